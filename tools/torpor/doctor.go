package main

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"text/tabwriter"
	"time"

	"github.com/spf13/cobra"
	"golang.org/x/sys/unix"

	"torpor/agent/cell"
	"torpor/tools/hostvm"
)

// finding is one line of the doctor.
type finding struct {
	Name   string `json:"name"`
	OK     bool   `json:"ok"`
	Detail string `json:"detail"`
}

// doctorBudget bounds each request of the doctor.
const doctorBudget = 10 * time.Second

func (a *app) doctorCommand() *cobra.Command {
	var asJSON, native bool
	var data string
	cmd := &cobra.Command{
		Use:   "doctor",
		Short: "Say which kind of host this is, what is up, and what is wrong; exit 1 if something is",
		Args:  cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			findings := a.examine(cmd.Context(), native, data)
			if asJSON {
				out := json.NewEncoder(cmd.OutOrStdout())
				out.SetIndent("", "  ")
				if err := out.Encode(findings); err != nil {
					return err
				}
			} else {
				table := tabwriter.NewWriter(cmd.OutOrStdout(), 0, 0, 2, ' ', 0)
				for _, f := range findings {
					mark := "ok"
					if !f.OK {
						mark = "FAULT"
					}
					fmt.Fprintf(table, "%s\t%s\t%s\n", mark, f.Name, f.Detail)
				}
				if err := table.Flush(); err != nil {
					return err
				}
			}
			for _, f := range findings {
				if !f.OK {
					return exitError(1)
				}
			}
			return nil
		},
	}
	cmd.Flags().BoolVar(&asJSON, "json", false, "print JSON")
	cmd.Flags().BoolVar(&native, "native", false, "examine this host as one that runs microVMs itself, whatever its KVM is")
	cmd.Flags().StringVar(&data, "data", "/var/lib/torpor", "data directory of a host that runs microVMs itself")
	return cmd
}

func (a *app) examine(ctx context.Context, native bool, data string) []finding {
	hardware, why := hostvm.Hardware()
	out := []finding{{"torpor", true, "version " + versionString()}}
	native = native || hardware
	if hardware {
		out = append(out, finding{"host", true, "hardware: " + why + "; microVMs run natively"})
	} else {
		out = append(out, finding{"host", true, "emulated: " + why + "; microVMs run inside a QEMU machine"})
	}
	out = append(out, examineKernel())
	if native {
		out = append(out, examineKVM("/dev/kvm"), examineJail(), examineDisk(data), examineImages(filepath.Join(data, "images", "base")))
	} else {
		cache := a.cacheDir()
		out = append(out, examineDisk(cache), examineImages(filepath.Join(cache, "images-*")))
	}
	return append(out, a.examineAPI(ctx)...)
}

func (a *app) cacheDir() string {
	if dir := a.env("TORPOR_CACHE"); dir != "" {
		return dir
	}
	return filepath.Join(a.env("HOME"), ".cache", "torpor")
}

func examineKernel() finding {
	var u unix.Utsname
	if err := unix.Uname(&u); err != nil {
		return finding{"kernel", false, err.Error()}
	}
	return finding{"kernel", true, unix.ByteSliceToString(u.Sysname[:]) + " " + unix.ByteSliceToString(u.Release[:])}
}

// examineKVM asks the device for its API version, which has been 12 since 2007 (KVM API documentation, 4.1).
func examineKVM(dev string) finding {
	if err := kvmUsable(dev); err != nil {
		return finding{"kvm", false, err.Error()}
	}
	f, err := os.OpenFile(dev, os.O_RDWR, 0)
	if err != nil {
		return finding{"kvm", false, err.Error()}
	}
	defer f.Close()
	const getAPIVersion, wanted = 0xae00, 12
	got, err := unix.IoctlRetInt(int(f.Fd()), getAPIVersion)
	if err != nil || got != wanted {
		return finding{"kvm", false, fmt.Sprintf("%s answers API version %d (%v), not %d", dev, got, err, wanted)}
	}
	return finding{"kvm", true, dev + " answers"}
}

func examineJail() finding {
	if err := cell.Check(); err != nil {
		return finding{"jail", false, err.Error()}
	}
	return finding{"jail", true, "cgroup v2 has what microVMs are limited by"}
}

// examineDisk measures where dir is, or the nearest parent that exists.
func examineDisk(dir string) finding {
	at := dir
	for {
		if _, err := os.Stat(at); err == nil || at == "/" {
			break
		}
		at = filepath.Dir(at)
	}
	free, err := freeBytes(at)
	if err != nil {
		return finding{"disk", false, err.Error()}
	}
	return finding{"disk", free >= minFreeBytes, fmt.Sprintf("%d MiB free for %s (at least %d MiB needed)", free>>20, dir, int64(minFreeBytes)>>20)}
}

// examineImages shows the newest image set that matches the pattern.
func examineImages(pattern string) finding {
	sets, err := filepath.Glob(filepath.Join(pattern, "image.json"))
	if err != nil || len(sets) == 0 {
		return finding{"image", false, "none at " + pattern + ": `make images` builds one"}
	}
	raw, err := os.ReadFile(sets[len(sets)-1])
	var image struct{ Name, Digest, Kernel string }
	if err == nil {
		err = json.Unmarshal(raw, &image)
	}
	if err != nil {
		return finding{"image", false, fmt.Sprintf("%s cannot be read: %v", sets[len(sets)-1], err)}
	}
	return finding{"image", true, fmt.Sprintf("%s %s, kernel %s", image.Name, image.Digest, image.Kernel)}
}

// examineAPI looks at the daemons. That nothing is up is told, and is no fault.
func (a *app) examineAPI(ctx context.Context) []finding {
	ctx, cancel := context.WithTimeout(ctx, doctorBudget)
	defer cancel()
	c, err := a.client()
	if err != nil {
		return []finding{{"credentials", false, err.Error()}}
	}
	health, err := c.Health(ctx)
	if err != nil {
		// Somebody with a key expects it to answer; to anybody else it is only not up.
		return []finding{{"daemons", c.Key == "", err.Error()}}
	}
	out := []finding{{"daemons", health.Status == "ok", fmt.Sprintf("%s at %s, version %s", health.Status, c.API, health.Version)}}
	if c.Key == "" {
		return append(out, finding{"key", false, "no API key: set E2B_API_KEY or run `torpor up`"})
	}
	rows, err := listRows(ctx, c)
	if err != nil {
		return append(out, finding{"key", false, err.Error()})
	}
	running := 0
	for _, r := range rows {
		if r.Public == "running" {
			running++
		}
	}
	return append(out, finding{"key", true, "accepted"}, finding{"sandboxes", true, fmt.Sprintf("%d, %d of them running", len(rows), running)})
}
