# Everything slow is kept below $(CACHE) by version or content; see tools/setup/deps.sh for what gets installed.

GOLANGCI_LINT_VERSION := v2.15.0
FUZZTIME ?= 60s
RUN ?= .
LONG ?= ^(TestCycles|TestClock|TestManyWakeAtOnce|TestKillsAtRandom)$$
CMD ?= true
INSTANCE ?= up

CACHE := $(or $(TORPOR_CACHE),$(HOME)/.cache/torpor)
LINT_DIR := $(CACHE)/tools/golangci-lint-$(GOLANGCI_LINT_VERSION)
LINT := $(LINT_DIR)/golangci-lint

# A newer Node.js that deps.sh had to bring goes before the distribution's.
export PATH := $(CACHE)/tools/node-20/bin:$(PATH)

# Programs, and the packages they are built from. Those with SQLite need cgo; all are static.
PROGRAMS := torpor torpor-vmm envd torpor-images torpor-hostvm torpor-hostvm-init
CGO_PROGRAMS := torpor-agent torpor-controlplane
package_torpor := ./tools/torpor
package_torpor-vmm := ./vmm
package_envd := ./guest
package_torpor-images := ./images
package_torpor-hostvm := ./tools/hostvm/torpor-hostvm
package_torpor-hostvm-init := ./tools/hostvm/init
package_torpor-agent := ./agent
package_torpor-controlplane := ./controlplane

UNIT_PACKAGES = $(shell go list ./... | grep -v -e /tools/e2e -e /tools/archtest)

.NOTPARALLEL:
.PHONY: help up down test check unit e2e boot-matrix soak soak-sleep fuzz bench bench-restore bench-floor bench-footprint bench-save bench-devices hostvm-up hostvm-down hostvm-exec build images deps FORCE

help: ## list the targets
	@sed -n 's/^\([a-z0-9-]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | expand -t 14

up: deps build ## install, build and bring Torpor up; ends by printing how to reach it
	@.bin/torpor up

down: ## pause what runs and stop everything that `make up` started
	@.bin/torpor down

test: deps build check unit e2e ## everything: checks, unit and KVM tests with the race detector, end to end

check: $(LINT) ## formatting, vet, lint, import rules
	$(LINT) fmt --diff
	go vet ./...
	$(LINT) run
	go test -count=1 ./tools/archtest

unit: ## unit and KVM tests with the race detector, and the seeds of the fuzz targets
	go test -race -shuffle=on -timeout 10m $(UNIT_PACKAGES)

e2e: deps build ## end-to-end tests on a real or emulated host (RUN=regexp)
	go test -count=1 -timeout 40m -run '$(RUN)' -v ./tools/e2e

boot-matrix: deps build ## boot the real guest in every machine shape and hold each to its budget of exits
	go test -count=1 -timeout 40m -run '^TestBootMatrixOnTheHost$$' -v ./tools/e2e -matrix

soak: ## start and kill a thousand jailed VMMs; nothing may be left (needs root, cgroup v2 and KVM)
	go test -count=1 -v -run TestStartsAndKillsLeaveNothing ./agent/vmproc -rounds 1000

soak-sleep: deps build ## the long forms of the tests of sleep and wake: 100 cycles, pauses of a minute, kills at random moments
	go test -count=1 -timeout 90m -v -run '$(LONG)' ./tools/e2e -long

fuzz: ## every fuzz target of the repository, FUZZTIME (60s) each
	tools/setup/fuzz.sh $(FUZZTIME)

bench: deps build ## measure template start, wake, pause and cold boot side by side
	go run ./tools/bench

bench-restore: deps build ## measure restores of the template: page cache warm and cold, with and without prefetch and pool, beside QEMU
	go run ./tools/bench restore

bench-floor: build ## measure a resume of a tiny guest against the bare ioctls (needs root and any /dev/kvm)
	go run ./tools/bench -rounds 40 -vmm .bin/torpor-vmm floor

bench-footprint: deps build ## measure what a torpor-vmm takes beyond its guest's memory
	go run ./tools/bench footprint

bench-save: deps ## measure how fast memory is saved beside what dd writes to the same disk; needs /dev/kvm and 5 GiB in $$TMPDIR
	go test -count=1 -v -run '^TestSaveKeepsUpWithTheDisk$$' ./vmm/machine -bench-save 1024

bench-devices: deps build ## measure the machine's devices beside QEMU's microvm
	go run ./tools/devbench

hostvm-up: deps build images ## start the emulated host of `make up` (INSTANCE=test: that of the tests) without Torpor in it
	.bin/torpor-hostvm up --instance $(INSTANCE) --images "$$(.bin/torpor-images build)"

hostvm-down: ## shut the emulated host down; its disk stays
	.bin/torpor-hostvm down --instance $(INSTANCE)

hostvm-exec: ## run CMD='shell command' as root in the emulated host; output and exit status pass through
	@.bin/torpor-hostvm exec --instance $(INSTANCE) -- "$$CMD"

hostvm-exec: export CMD := $(value CMD)

build: $(PROGRAMS:%=.bin/%) $(CGO_PROGRAMS:%=.bin/%) ## the programs, into .bin/

images: deps build ## the guest image set, from Debian packages; prints where it is
	.bin/torpor-images build

deps: ## install what is missing: QEMU, build tools, iasl, Node.js
	@tools/setup/deps.sh

# Go knows what is up to date.
$(PROGRAMS:%=.bin/%): .bin/%: FORCE
	@CGO_ENABLED=0 go build -trimpath -ldflags '-s -w' -o $@ $(package_$*)

$(CGO_PROGRAMS:%=.bin/%): .bin/%: FORCE
	@CGO_ENABLED=1 go build -trimpath -tags 'sqlite_omit_load_extension netgo osusergo' -ldflags '-s -w -linkmode external -extldflags -static' -o $@ $(package_$*)

$(LINT):
	GOBIN=$(LINT_DIR) go install github.com/golangci/golangci-lint/v2/cmd/golangci-lint@$(GOLANGCI_LINT_VERSION)
