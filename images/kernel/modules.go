package kernel

import (
	"bytes"
	"debug/elf"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
)

// Modules knows the loadable modules of one kernel by name. What a module needs is read from the module itself (its
// .modinfo section): the package ships no modules.dep, that is depmod's work on an installed system.
type Modules struct {
	files   map[string]string // module name -> file
	builtin map[string]bool
}

// ModuleName is how the kernel spells a module: the file's name without directory and suffix, "-" as "_".
func ModuleName(path string) string {
	return strings.ReplaceAll(strings.TrimSuffix(filepath.Base(path), ".ko"), "-", "_")
}

// OpenModules reads a lib/modules/<release> directory.
func OpenModules(dir string) (*Modules, error) {
	m := &Modules{files: map[string]string{}, builtin: map[string]bool{}}
	list, err := os.ReadFile(filepath.Join(dir, "modules.builtin"))
	if err != nil {
		return nil, fmt.Errorf("list what is built into the kernel: %w", err)
	}
	for line := range strings.Lines(string(list)) {
		m.builtin[ModuleName(strings.TrimSpace(line))] = true
	}
	err = filepath.WalkDir(filepath.Join(dir, "kernel"), func(path string, d fs.DirEntry, err error) error {
		if err == nil && d.Type().IsRegular() && strings.HasSuffix(path, ".ko") {
			m.files[ModuleName(path)] = path
		}
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("list kernel modules: %w", err)
	}
	return m, nil
}

// Closure gives the files of the named modules and of all they need, each once, in an order in which they can be
// loaded. Names that are built into the kernel are left out; an unknown name is an error.
func (m *Modules) Closure(names ...string) ([]string, error) {
	return closure(names, func(name string) (string, []string, error) {
		if m.builtin[name] {
			return "", nil, nil
		}
		path, ok := m.files[name]
		if !ok {
			return "", nil, fmt.Errorf("the kernel has no module %s", name)
		}
		content, err := os.ReadFile(path)
		if err != nil {
			return "", nil, err
		}
		needs, err := moduleNeeds(content)
		if err != nil {
			return "", nil, fmt.Errorf("module %s: %w", name, err)
		}
		return path, needs, nil
	})
}

// closure orders modules so that each comes after what it needs. look gives a module's file (empty: nothing to load)
// and needs. Modules cannot need each other in a circle, so a circle is an error.
func closure(names []string, look func(name string) (path string, needs []string, err error)) ([]string, error) {
	const visiting, done = 1, 2
	state := map[string]int{}
	var order []string
	var visit func(name string) error
	visit = func(name string) error {
		name = ModuleName(name)
		switch state[name] {
		case done:
			return nil
		case visiting:
			return fmt.Errorf("module %s needs itself", name)
		}
		state[name] = visiting
		path, needs, err := look(name)
		if err != nil {
			return err
		}
		for _, need := range needs {
			if err := visit(need); err != nil {
				return err
			}
		}
		state[name] = done
		if path != "" {
			order = append(order, path)
		}
		return nil
	}
	for _, name := range names {
		if err := visit(name); err != nil {
			return nil, err
		}
	}
	return order, nil
}

// moduleNeeds reads the "depends=" entry of a module file.
func moduleNeeds(ko []byte) ([]string, error) {
	f, err := elf.NewFile(bytes.NewReader(ko))
	if err != nil {
		return nil, fmt.Errorf("not an ELF file: %w", err)
	}
	defer f.Close()
	section := f.Section(".modinfo")
	if section == nil {
		return nil, errors.New("no .modinfo section")
	}
	info, err := section.Data()
	if err != nil {
		return nil, fmt.Errorf("read .modinfo: %w", err)
	}
	return parseDepends(info), nil
}

// parseDepends finds the needs in a .modinfo section: NUL-terminated "key=value" strings, "depends" a comma-separated list.
func parseDepends(info []byte) []string {
	var needs []string
	for entry := range bytes.SplitSeq(info, []byte{0}) {
		value, ok := bytes.CutPrefix(entry, []byte("depends="))
		if !ok {
			continue
		}
		for name := range strings.SplitSeq(string(value), ",") {
			if name = strings.TrimSpace(name); name != "" {
				needs = append(needs, name)
			}
		}
	}
	return needs
}
