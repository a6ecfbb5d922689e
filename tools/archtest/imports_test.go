package archtest

import (
	"encoding/json"
	"errors"
	"io"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

const module = "torpor"

// allowed says, for a package and all below it, what of ours it may import. The most specific rule decides, and a package may
// always import what lies below the rule's own prefix. Contracts (api) are everybody's; commands go down the list of
// components, never by import.
var allowed = map[string][]string{
	"api":          {},
	"controlplane": {"api"},
	"agent":        {"api", "vmm/snapshot", "vmm/cow", "vmm/jail", "images"},
	"vmm":          {"api"},
	"guest":        {"api"},
	"images":       {"api"},
	"tools":        {"api", "agent", "controlplane", "vmm", "guest", "images"},

	// Leaves: what they are about must be testable without the rest of the machine.
	"vmm/kvm":          {},
	"vmm/guestmem":     {},
	"vmm/snapshot":     {},
	"vmm/cow":          {},
	"vmm/legacy":       {},
	"vmm/jail":         {},
	"vmm/ratelimit":    {},
	"vmm/virtio/virtq": {},
}

// pkg is what `go list -json` tells of one package.
type pkg struct {
	ImportPath, Dir, Doc, Name string
	Imports, Deps              []string
	GoFiles                    []string
	TestImports, XTestImports  []string
}

func TestImportsFollowTheRules(t *testing.T) {
	for _, p := range list(t, "./...") {
		name := strings.TrimPrefix(p.ImportPath, module+"/")
		prefix, rule, ok := ruleFor(name)
		if !ok {
			t.Errorf("%s: no rule covers it: say in archtest who may import what there", p.ImportPath)
			continue
		}
		for _, imported := range p.Imports {
			target, ours := strings.CutPrefix(imported, module+"/")
			if ours && !within(target, prefix) && !slices.ContainsFunc(rule, func(r string) bool { return within(target, r) }) {
				t.Errorf("%s may not import %s (rule of %s: %v)", name, target, prefix, rule)
			}
		}
	}
}

func TestNothingImportsTools(t *testing.T) {
	for _, p := range list(t, "./...") {
		name := strings.TrimPrefix(p.ImportPath, module+"/")
		if within(name, "tools") {
			continue
		}
		for _, imported := range slices.Concat(p.Imports, p.TestImports, p.XTestImports) {
			if target, ours := strings.CutPrefix(imported, module+"/"); ours && within(target, "tools") && target != "tools/hosttest" {
				t.Errorf("%s imports %s: tools are developers' programs", name, target)
			}
		}
	}
}

// A hostile guest sits in front of these two: what they do not link cannot be used against us, nor does it cost every guest memory.
func TestSmallProgramsStaySmall(t *testing.T) {
	banned := map[string][]string{
		"./vmm":   {"net/http", "database/sql", "github.com/mattn/go-sqlite3"},
		"./guest": {"database/sql", "github.com/mattn/go-sqlite3"},
	}
	for program, deps := range banned {
		for _, p := range list(t, program) {
			for _, dep := range deps {
				if slices.Contains(p.Deps, dep) {
					t.Errorf("%s links %s", program, dep)
				}
			}
		}
	}
}

func TestEveryPackageSaysWhatItIsFor(t *testing.T) {
	for _, p := range list(t, "./...") {
		written := slices.ContainsFunc(p.GoFiles, func(name string) bool { return !generatedFile(t, filepath.Join(p.Dir, name)) })
		if written && p.Doc == "" {
			t.Errorf("%s: no package comment", p.ImportPath)
		}
	}
}

func TestLayoutHasNoAttic(t *testing.T) {
	for _, p := range list(t, "./...") {
		for part := range strings.SplitSeq(p.ImportPath, "/") {
			switch part {
			case "pkg", "internal", "cmd", "util", "utils", "common", "helpers", "manager", "types", "models", "misc":
				t.Errorf("%s: a package is named for what it holds, not %q", p.ImportPath, part)
			}
		}
	}
}

// ruleFor finds the most specific rule.
func ruleFor(name string) (prefix string, rule []string, ok bool) {
	for p, r := range allowed {
		if within(name, p) && (!ok || len(p) > len(prefix)) {
			prefix, rule, ok = p, r, true
		}
	}
	return prefix, rule, ok
}

// within reports whether name is prefix or lies below it.
func within(name, prefix string) bool {
	rest, ok := strings.CutPrefix(name, prefix)
	return ok && (rest == "" || rest[0] == '/')
}

func TestWithin(t *testing.T) {
	for _, c := range []struct {
		name, prefix string
		want         bool
	}{{"vmm", "vmm", true}, {"vmm/kvm", "vmm", true}, {"vmmx", "vmm", false}, {"vmm", "vmm/kvm", false}} {
		if got := within(c.name, c.prefix); got != c.want {
			t.Errorf("within(%q, %q) = %v", c.name, c.prefix, got)
		}
	}
}

// list asks the go tool about packages; patterns are relative to the repository's root.
func list(t *testing.T, patterns ...string) []pkg {
	t.Helper()
	cmd := exec.Command("go", append([]string{"list", "-json=ImportPath,Dir,Doc,Name,Imports,Deps,GoFiles,TestImports,XTestImports"}, patterns...)...)
	cmd.Dir = root(t)
	out, err := cmd.Output()
	if err != nil {
		var exit *exec.ExitError
		if errors.As(err, &exit) {
			t.Fatalf("go list: %s", exit.Stderr)
		}
		t.Fatal(err)
	}
	var pkgs []pkg
	for dec := json.NewDecoder(strings.NewReader(string(out))); ; {
		var p pkg
		if err := dec.Decode(&p); err == io.EOF {
			return pkgs
		} else if err != nil {
			t.Fatal(err)
		}
		pkgs = append(pkgs, p)
	}
}

func root(t *testing.T) string {
	t.Helper()
	dir, err := filepath.Abs("../..")
	if err != nil {
		t.Fatal(err)
	}
	return dir
}
