package machine

import (
	"errors"
	"os"
	"slices"
	"strings"
	"testing"

	"github.com/rs/zerolog"

	"torpor/vmm/snapshot"
	"torpor/vmm/x86"
)

func TestUnknownCPUTemplateIsRefusedByName(t *testing.T) {
	cfg := testConfig(1, 128*mib)
	cfg.CPUTemplate = "pentium"
	for op, try := range map[string]func() error{
		"boot":    func() error { _, err := Boot(cfg, Kernel{}, zerolog.Nop()); return err },
		"restore": func() error { _, _, err := Restore(cfg, Snapshot{}, true, zerolog.Nop()); return err },
	} {
		if err := try(); !errors.Is(err, ErrConfig) || !strings.Contains(err.Error(), `"pentium"`) {
			t.Errorf("%s: %v", op, err)
		}
	}
}

// A host either takes a template, and then promises the guest no more than that, or names what it lacks for it.
func TestCPUTemplate(t *testing.T) {
	needKVM(t)
	for _, name := range []string{x86.TemplateV2, x86.TemplateV3} {
		t.Run(name, func(t *testing.T) {
			cfg := testConfig(2, 128*mib)
			cfg.CPUTemplate = name
			m, err := Boot(cfg, Kernel{Image: openFile(t, kernelOf(t, tinyCode), os.O_RDONLY)}, zerolog.New(zerolog.NewTestWriter(t)))
			if errors.Is(err, ErrCPU) {
				if !strings.Contains(err.Error(), name+": it lacks ") {
					t.Errorf("refused without a reason: %v", err)
				}
				t.Logf("this host does not take it: %v", err)
				return
			}
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() { closeMachine(t, m) })
			counts(t, m, 0)
			full, _ := save(t, m, "")
			state, err := snapshot.ReadState(full.state)
			if err != nil {
				t.Fatal(err)
			}
			if state.CPU.Template != name {
				t.Errorf("saved with template %q", state.CPU.Template)
			}
			for _, f := range state.CPU.Features {
				if f.Leaf == 7 && f.Register == snapshot.EBX && f.Bits&^0x1a9 != 0 {
					t.Errorf("the guest was promised leaf 7 EBX %#x", f.Bits)
				}
			}
			other := cfg
			other.CPUTemplate = ""
			if _, _, err := Restore(other, full.open(t), true, zerolog.Nop()); !errors.Is(err, snapshot.ErrMismatch) || !strings.Contains(err.Error(), name) {
				t.Errorf("restored by a machine without the template: %v", err)
			}
			r := restoreTiny(t, cfg, full)
			if err := r.Resume(); err != nil {
				t.Fatal(err)
			}
			counts(t, r, r.peek(t, tinyCounter))
		})
	}
}

// A snapshot of a CPU that can do more is refused with the names of what this one lacks.
func TestRestoreOnALesserCPUNamesWhatIsMissing(t *testing.T) {
	cfg := testConfig(1, 128*mib)
	m := bootTiny(t, cfg)
	full, _ := save(t, m, "")
	state, err := snapshot.ReadState(full.state)
	if err != nil {
		t.Fatal(err)
	}
	richer := state.CPU
	richer.Features = slices.Clone(richer.Features)
	for i, f := range richer.Features {
		if f.Leaf == 7 && f.Index == 0 && f.Register == snapshot.ECX {
			richer.Features[i].Bits |= 1 << 16 // five-level page tables, which the emulated host switches off
		}
	}
	richer.XSaveBytes = 1 << 20
	r := restoreTiny(t, cfg, full)
	err = r.checkCPU(richer)
	if !errors.Is(err, ErrCPU) || !strings.Contains(err.Error(), "la57") || !strings.Contains(err.Error(), "1048576 bytes of extended state") {
		t.Errorf("%v", err)
	}
	if err := r.checkCPU(state.CPU); err != nil {
		t.Errorf("its own CPU: %v", err)
	}
}
