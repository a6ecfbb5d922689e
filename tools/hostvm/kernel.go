package hostvm

import (
	"context"
	"errors"
	"fmt"
	"os/exec"
	"strings"

	"github.com/rs/zerolog"

	"torpor/images/cache"
	"torpor/images/kernel"
)

// modulesWanted are loaded at start: KVM for AMD-V, the virtio devices of the machine, and what the agent uses.
var modulesWanted = []string{"virtio_pci", "virtio_blk", "virtio_net", "kvm_amd", "tun"}

// findKernel answers the image and, in the order of loading, the modules of the Debian cloud kernel: the very one that
// the guests run too. The first time it is fetched into the cache.
func findKernel(ctx context.Context, log zerolog.Logger, dir string) (image string, modules []string, err error) {
	store, err := cache.Open(dir)
	if err != nil {
		return "", nil, err
	}
	// The lock may be held for minutes by an image build. A kernel that is there never changes, so reading it needs none.
	if _, ok := store.Follow("kernel-current"); !ok {
		unlock, err := store.Lock(ctx)
		if err != nil {
			return "", nil, err
		}
		defer unlock()
	}
	p, err := kernel.Ensure(ctx, log, store, false)
	if err != nil {
		return "", nil, err
	}
	m, err := kernel.OpenModules(p.ModulesDir())
	if err != nil {
		return "", nil, err
	}
	modules, err = m.Closure(modulesWanted...)
	return p.Vmlinuz(), modules, err
}

// output runs a program and answers what it wrote; an error carries the last line it complained with.
func output(ctx context.Context, dir, name string, args ...string) (string, error) {
	cmd := exec.CommandContext(ctx, name, args...)
	cmd.Dir = dir
	out, err := cmd.Output()
	if e, ok := errors.AsType[*exec.ExitError](err); ok {
		lines := strings.Split(strings.TrimSpace(string(e.Stderr)), "\n")
		return "", fmt.Errorf("%s: %w: %s", name, err, lines[len(lines)-1])
	}
	if err != nil {
		return "", fmt.Errorf("%s: %w", name, err)
	}
	return string(out), nil
}
