package initramfs

import (
	"bytes"
	"debug/elf"
	"errors"
	"fmt"
	"io"
	"os"
	"path"
	"path/filepath"
)

// Names that the guest's init relies on.
const (
	InitPath    = "/init"          // envd
	OrderPath   = "/modules.order" // one absolute path per line, in the order to load them
	ModulesPath = "/modules"       // where the modules are
	NewRootPath = "/newroot"       // where the real root goes
)

// Inputs is what an initramfs is made of.
type Inputs struct {
	Envd    string   // path of the envd binary: static, x86-64
	Modules []string // paths of module files in load order
}

// Write writes the archive for in.
func Write(w io.Writer, in Inputs) error {
	entries, err := list(in)
	if err != nil {
		return err
	}
	return writeArchive(w, entries)
}

func list(in Inputs) ([]entry, error) {
	envd, err := os.ReadFile(in.Envd)
	if err != nil {
		return nil, fmt.Errorf("read envd: %w", err)
	}
	if err := CheckStatic(envd); err != nil {
		return nil, fmt.Errorf("%s cannot be the guest's init: %w", in.Envd, err)
	}
	entries := []entry{
		{name: "dev", mode: typeDir | 0o755},
		// The kernel opens /dev/console for init before anything could mount devtmpfs.
		{name: "dev/console", mode: typeChar | 0o600, major: 5, minor: 1},
		{name: "proc", mode: typeDir | 0o755},
		{name: "sys", mode: typeDir | 0o755},
		{name: NewRootPath[1:], mode: typeDir | 0o755},
		{name: ModulesPath[1:], mode: typeDir | 0o755},
	}
	var order bytes.Buffer
	for _, file := range in.Modules {
		content, err := os.ReadFile(file)
		if err != nil {
			return nil, fmt.Errorf("read a kernel module: %w", err)
		}
		name := path.Join(ModulesPath, filepath.Base(file))
		fmt.Fprintln(&order, name)
		entries = append(entries, entry{name: name[1:], mode: typeRegular | 0o644, content: content})
	}
	return append(entries,
		entry{name: OrderPath[1:], mode: typeRegular | 0o644, content: order.Bytes()},
		entry{name: InitPath[1:], mode: typeRegular | 0o755, content: envd},
	), nil
}

// CheckStatic tells whether a program runs with nothing beside it: as PID 1 in an initramfs there is no loader.
func CheckStatic(program []byte) error {
	f, err := elf.NewFile(bytes.NewReader(program))
	if err != nil {
		return fmt.Errorf("not an ELF file: %w", err)
	}
	defer f.Close()
	if f.Class != elf.ELFCLASS64 || f.Machine != elf.EM_X86_64 {
		return fmt.Errorf("built for %v, not for x86-64", f.Machine)
	}
	for _, p := range f.Progs {
		if p.Type == elf.PT_INTERP {
			return errors.New("dynamically linked: build it with CGO_ENABLED=0")
		}
	}
	return nil
}
