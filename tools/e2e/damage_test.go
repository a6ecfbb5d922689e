package e2e

import (
	"errors"
	"fmt"
	"net/http"
	"path"
	"strconv"
	"strings"
	"testing"
	"time"

	"torpor/tools/rest"
)

var (
	cutShort = damage{
		"cut short",
		`mv "$f" ` + aside + ` && dd if=` + aside + ` of="$f" bs=$(( ($(stat -c %s ` + aside + `) - 1) < 4096 ? ($(stat -c %s ` + aside + `) - 1) : 4096 )) count=1 2>/dev/null`,
		`mv ` + aside + ` "$f"`,
	}
	lastByteCut = damage{
		"last byte cut off",
		`tail -c 1 "$f" > ` + aside + ` && truncate -s $(( $(stat -c %s "$f") - 1 )) "$f"`,
		`cat ` + aside + ` >> "$f"`,
	}
	deleted = damage{"deleted", `mv "$f" ` + aside, `mv ` + aside + ` "$f"`}
)

// damagesOf says what is done to a file. A disk layer is sparse, has no checksums of its data while it may be written, and says so: of it,
// the header and the first sector of the map are damaged.
func damagesOf(file string) []damage {
	if path.Ext(file) == ".layer" {
		return []damage{flip("header", "9"), flip("map", "4096 + 508"), cutShort, lastByteCut, deleted}
	}
	return []damage{
		flip("first byte", "0"), flip("a quarter in", "size / 4"), flip("middle", "size / 2"), flip("last byte", "size - 1"), cutShort, lastByteCut, deleted,
	}
}

// harmless are files that a wake does not need.
var harmless = map[string]bool{"console.log": true, "vmm.log": true}

// Whatever happens to a file of a sleeping sandbox, a wake says within moments which part is damaged; it never runs a wrong guest, and
// harms nobody else. With the file as it was, the sandbox is whole again. Damaged for good, it can be killed.
func TestDamageIsNamedAndHarmsNobodyElse(t *testing.T) {
	bystander := startWitness(t, newSandbox(t, rest.NewSandbox{}))
	w := startWitness(t, newSandbox(t, rest.NewSandbox{}))
	id := w.sb.SandboxID
	pause(t, id) // its first sleep: there is no earlier one to fall back to
	hostShell(t, killVMM(id))

	files := strings.Fields(hostShell(t, fmt.Sprintf("cd %s && find . -type f | sort", sandboxDir(id))))
	var last string
	cases := 0
	for _, file := range files {
		if harmless[path.Base(file)] {
			continue
		}
		last = path.Join(sandboxDir(id), file)
		for _, d := range damagesOf(file) {
			cases++
			t.Run(path.Base(file)+" "+d.name, func(t *testing.T) { damagedWakeFails(t, id, last, d) })
			if s := state(t, id); s.VM.State == "running" {
				t.Fatal("it runs, so its files are not those of a sleeper any more")
			}
		}
	}
	t.Logf("%d files, %d damages", len(files), cases)
	if cases == 0 {
		t.Error("there is no file to damage: it has not tested anything")
	}
	bystander.check(t)

	w.sb = wake(t, id)
	w.check(t)
	pause(t, id)
	hostShell(t, "rm "+last)
	if _, _, err := sys.Connect(within(t, callLimit), id, lifetime); err == nil {
		t.Error("it woke without " + last)
	}
	if err := sys.Kill(within(t, callLimit), id); err != nil {
		t.Errorf("killing the damaged one: %v", err)
	}
	if left := hostShell(t, "ls -d "+sandboxDir(id)+" 2>/dev/null || true"); left != "" {
		t.Errorf("the killed one left %s", left)
	}
}

// damagedWakeFails damages one file, demands the error, and undoes the damage.
func damagedWakeFails(t *testing.T, id, file string, d damage) {
	name := "f='" + file + "'; "
	hostShell(t, name+`touch -r "$f" `+aside+".time; "+d.do)
	defer hostShell(t, name+d.undo+`; touch -r `+aside+`.time "$f"; rm -f `+aside+"*") // with the times it had: nobody shall know it again by them
	began := time.Now()
	_, _, err := sys.Connect(within(t, damageLimit), id, lifetime)
	took := time.Since(began)
	if err == nil {
		t.Errorf("the sandbox woke from it after %v", took)
		return
	}
	var answer *rest.Error
	if !errors.As(err, &answer) || answer.Status != http.StatusInternalServerError || answer.Code != "sandbox_broken" {
		t.Errorf("after %v: %v (%+v), want 500 sandbox_broken", took, err, answer)
	}
	if !strings.Contains(err.Error(), path.Base(file)) {
		t.Errorf("the error does not name %s: %v", path.Base(file), err)
	}
	if s := state(t, id); s.VM.State != "failed" || s.Public == "running" || s.VM.Reason == "" {
		t.Errorf("it is %s, vm %s: %s", s.Public, s.VM.State, s.VM.Reason)
	}
	t.Logf("%v: %v", took.Round(time.Millisecond), err)
}

// Damage of one of the template's small files is told by a create and does nothing to those who run.
func TestDamagedTemplateIsNamed(t *testing.T) {
	w := startWitness(t, newSandbox(t, rest.NewSandbox{}))
	template, err := sys.Template(within(t, callLimit), "base")
	if err != nil {
		t.Fatal(err)
	}
	dir := "/var/lib/torpor/agent/templates/" + strings.TrimPrefix(template.Digest, "sha256:")[:12]
	for _, line := range strings.Split(hostShell(t, "cd "+dir+" && find . -type f -exec stat -c '%s %n' {} +"), "\n") {
		size, file, _ := strings.Cut(line, " ")
		if n, err := strconv.ParseInt(size, 10, 64); err != nil || n > 1<<20 || path.Base(file) == "manifest.json" {
			continue // what running sandboxes have mapped or open must not be touched; the manifest is read at the agent's start
		}
		for _, d := range []damage{flip("middle", "size / 2"), cutShort, deleted} {
			t.Run(path.Base(file)+" "+d.name, func(t *testing.T) {
				name := "f='" + path.Join(dir, file) + "'; "
				hostShell(t, name+d.do)
				defer hostShell(t, name+d.undo+"; rm -f "+aside)
				sb, err := sys.Create(within(t, damageLimit), rest.NewSandbox{TemplateID: "base", Timeout: int(lifetime.Seconds())})
				if err == nil {
					cleanUp(t, sb.SandboxID)
					t.Fatal("a sandbox was created from it")
				}
				if msg := err.Error(); !strings.Contains(msg, path.Base(file)) && !strings.Contains(msg, "snapshot: ") {
					t.Errorf("the error does not say what is wrong: %v", err)
				}
				t.Log(err)
			})
		}
	}
	w.check(t)
	newSandbox(t, rest.NewSandbox{})
}
