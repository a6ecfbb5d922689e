package base

import (
	"crypto/sha256"
	_ "embed"
	"encoding/hex"
	"encoding/json"
	"strconv"
)

//go:embed customize.sh
var customizeScript string

// recipeVersion goes up when the way of building changes in a manner that the rest of the recipe does not show.
const recipeVersion = 1

// suite is the Debian release of the guest.
const suite = "bookworm"

// epoch stamps everything that is made by the build itself rather than shipped in a package: 2025-01-01, in Unix seconds.
const epoch = 1735689600

// packages is what the guest has beyond Debian's essential packages and apt; what they depend on comes with them,
// what they recommend does not.
var packages = []string{
	"bash", "ca-certificates", "coreutils", "curl", "git", "grep", "gzip", "iproute2", "less", "ncurses-base", "ncurses-bin",
	"procps", "python-is-python3", "python3", "sed", "sqlite3", "sudo", "tar", "util-linux",
}

// dpkgOptions keep manuals and translations out; licences stay in. They also stay in force inside the guest.
var dpkgOptions = []string{
	"path-exclude=/usr/share/doc/*",
	"path-include=/usr/share/doc/*/copyright",
	"path-exclude=/usr/share/info/*",
	"path-exclude=/usr/share/lintian/*",
	"path-exclude=/usr/share/locale/*",
	"path-include=/usr/share/locale/locale.alias",
	"path-exclude=/usr/share/man/*",
}

// disk is the root disk of every guest: 4 GiB, of which the packages fill some 220 MB.
var disk = Layout{
	Bytes:      4 << 30,
	Inodes:     262144,
	JournalMiB: 16,
	UUID:       "7f0e9a4c-52d1-4b7e-9c35-0d6a1e8b2f41",
	HashSeed:   "b36c1d52-0e8f-4a97-8a1b-6c4f2d9e7035",
	Label:      "torpor-base",
	Time:       epoch,
}

// recipeHash changes with anything we decide about the root file system.
func recipeHash() string {
	return hash(strconv.Itoa(recipeVersion), suite, packages, dpkgOptions, customizeScript, disk)
}

// rootfsKey names a root file system: our decisions and the exact versions of all packages in it.
func rootfsKey(recipe string, versions []string) string { return hash(recipe, versions) }

// hash is the first 12 hex digits of the SHA-256 of values' JSON.
func hash(values ...any) string {
	h := sha256.New()
	enc := json.NewEncoder(h)
	for _, v := range values {
		if err := enc.Encode(v); err != nil {
			// Only strings, numbers and slices and structs of them come here: JSON can write those.
			panic(err)
		}
	}
	return hex.EncodeToString(h.Sum(nil))[:12]
}
