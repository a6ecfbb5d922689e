package sandbox

import (
	"fmt"
	"path/filepath"
	"strconv"
	"strings"
)

// paths are the files of one sandbox.
type paths struct{ dir string }

func (p paths) console() string          { return filepath.Join(p.dir, "console.log") }
func (p paths) vmmLog() string           { return filepath.Join(p.dir, "vmm.log") }
func (p paths) layers() string           { return filepath.Join(p.dir, "layers") }
func (p paths) layer(name string) string { return filepath.Join(p.layers(), name) }

func (p paths) generation(n uint64) string {
	return filepath.Join(p.dir, fmt.Sprintf("%s%d", genPrefix, n))
}

const (
	genPrefix   = "gen-"
	layerSuffix = ".layer"
	stateFile   = "vmstate"
)

func layerName(n uint64) string { return strconv.FormatUint(n, 10) + layerSuffix }

// generationOf reads the number out of a generation's directory name.
func generationOf(name string) (uint64, bool) {
	digits, ok := strings.CutPrefix(name, genPrefix)
	if !ok {
		return 0, false
	}
	n, err := strconv.ParseUint(digits, 10, 64)
	return n, err == nil
}
