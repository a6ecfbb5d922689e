package archtest

import (
	"bytes"
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
)

// longFile is where a file is reported. Length is a smell and no fault: it is printed (go test -v) and fails nothing.
const longFile = 400

func TestLongFilesAreReported(t *testing.T) {
	for _, f := range goFiles(t) {
		if lines := bytes.Count(f.text, []byte("\n")); lines > longFile && !f.generated {
			t.Logf("%s has %d lines", f.path, lines)
		}
	}
}

// The linter has the same rule; here it holds also where the linter does not run.
func TestUnsafeIsWhereItsNameSays(t *testing.T) {
	for _, f := range goFiles(t) {
		if f.generated || strings.HasSuffix(f.path, "_test.go") || strings.HasSuffix(f.path, "_unsafe.go") {
			continue
		}
		if slices.Contains(f.imports(t), "unsafe") {
			t.Errorf("%s imports unsafe: put it in a *_unsafe.go file", f.path)
		}
	}
}

func TestSQLIsInTheStores(t *testing.T) {
	for _, f := range goFiles(t) {
		store := within(f.path, "agent/store") || within(f.path, "controlplane/store") || strings.HasSuffix(f.path, "_test.go")
		for _, imported := range f.imports(t) {
			if !store && (imported == "database/sql" || imported == "github.com/mattn/go-sqlite3") {
				t.Errorf("%s imports %s: SQL lives in the store packages", f.path, imported)
			}
		}
	}
}

// The guest's clock, and everything that waits, hangs on events: product code never just sleeps, and only main starts a context
// or reads the environment.
func TestProductCodeNeitherSleepsNorReadsTheEnvironment(t *testing.T) {
	banned := map[string]string{
		"time.Sleep": "wait on a channel, a timer and ctx.Done()", "context.TODO": "take a ctx", "context.Background": "take a ctx; only main starts one",
		"os.Getenv": "main reads the environment and passes values down", "os.LookupEnv": "main reads the environment and passes values down",
		"fmt.Print": "log through the zerolog.Logger given", "fmt.Println": "log through the zerolog.Logger given", "fmt.Printf": "log through the zerolog.Logger given",
	}
	for _, f := range goFiles(t) {
		if f.generated || strings.HasSuffix(f.path, "_test.go") || filepath.Base(f.path) == "main.go" || within(f.path, "tools") {
			continue
		}
		ast.Inspect(f.parse(t, parser.SkipObjectResolution), func(n ast.Node) bool {
			sel, ok := n.(*ast.SelectorExpr)
			if !ok {
				return true
			}
			if x, ok := sel.X.(*ast.Ident); ok && banned[x.Name+"."+sel.Sel.Name] != "" {
				t.Errorf("%s uses %s.%s: %s", f.path, x.Name, sel.Sel.Name, banned[x.Name+"."+sel.Sel.Name])
			}
			return true
		})
	}
}

// goFile is one Go source of ours; path is relative to the root, with slashes.
type goFile struct {
	path      string
	text      []byte
	generated bool
}

func (f goFile) parse(t *testing.T, mode parser.Mode) *ast.File {
	t.Helper()
	file, err := parser.ParseFile(token.NewFileSet(), f.path, f.text, mode)
	if err != nil {
		t.Fatal(err)
	}
	return file
}

func (f goFile) imports(t *testing.T) []string {
	t.Helper()
	var out []string
	for _, spec := range f.parse(t, parser.ImportsOnly).Imports {
		path, err := strconv.Unquote(spec.Path.Value)
		if err != nil {
			t.Fatal(err)
		}
		out = append(out, path)
	}
	return out
}

func goFiles(t *testing.T) []goFile {
	t.Helper()
	var out []goFile
	top := root(t)
	err := filepath.WalkDir(top, func(path string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		if d.IsDir() && (d.Name() == "node_modules" || strings.HasPrefix(d.Name(), ".") && path != top) {
			return filepath.SkipDir
		}
		if d.IsDir() || filepath.Ext(path) != ".go" {
			return nil
		}
		text, err := os.ReadFile(path)
		if err != nil {
			return err
		}
		name, err := filepath.Rel(top, path)
		out = append(out, goFile{filepath.ToSlash(name), text, saysGenerated(text)})
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	if len(out) == 0 {
		t.Fatal("no Go file found: is this still the repository?")
	}
	return out
}

// saysGenerated looks for the mark generators leave near the top (go help generate).
func saysGenerated(text []byte) bool {
	head := text[:min(len(text), 400)]
	return bytes.Contains(head, []byte("// Code generated ")) && bytes.Contains(head, []byte(" DO NOT EDIT."))
}

func generatedFile(t *testing.T, path string) bool {
	t.Helper()
	text, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	return saysGenerated(text)
}
