package main

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"torpor/tools/rest"
)

// neighbours is how many sandboxes run side by side in the last measurement of a footprint run.
const neighbours = 4

// footprint measures what a torpor-vmm costs the host beyond the memory of its guest: alone on the host, where the pages of its
// program are all charged to it, after a wake, and beside others, where they share them. The last line is the largest of those: a
// host is there for many.
func footprint(ctx context.Context, o options, w io.Writer) (err error) {
	c, err := client(o)
	if err != nil {
		return err
	}
	if others, err := vmms(false); err != nil || len(others) > 0 {
		return errors.Join(err, fmt.Errorf("%d microVMs run already: the footprint is measured on a host of its own", len(others)))
	}
	var ids []string
	defer func() {
		for _, id := range ids {
			err = errors.Join(err, c.Kill(context.WithoutCancel(ctx), id))
		}
	}()
	last := 0.0
	tell := func(when string) (err error) {
		if last, err = worstFootprint(false); err == nil {
			fmt.Fprintf(w, "%-40s %.2f MiB\n", when, last)
		}
		return err
	}
	create := func() (rest.Sandbox, error) {
		sb, err := c.Create(ctx, rest.NewSandbox{TemplateID: "base", Timeout: int(roundBudget.Seconds())})
		if err != nil {
			return sb, err
		}
		ids = append(ids, sb.SandboxID)
		_, err = c.Output(ctx, sb, firstCommand)
		return sb, err
	}
	if idle, err := worstFootprint(true); err == nil {
		fmt.Fprintf(w, "%-40s %.2f MiB\n", "waiting in the pool, the largest", idle)
	}
	sb, err := create()
	if err != nil {
		return err
	}
	if err := tell("alone, from its template"); err != nil {
		return err
	}
	if err := cycle(ctx, c, sb, o.touched); err != nil {
		return err
	}
	if err := tell("alone, woken from its own snapshot"); err != nil {
		return err
	}
	for len(ids) < neighbours {
		if _, err := create(); err != nil {
			return err
		}
	}
	if err := tell(fmt.Sprintf("the largest of %d", neighbours)); err != nil {
		return err
	}
	fmt.Fprintf(w, "PSS beyond guest memory: %.1f MiB\n", last)
	if last > o.most {
		return fmt.Errorf("a torpor-vmm takes %.1f MiB beyond its guest's memory, the limit is %.1f", last, o.most)
	}
	return nil
}

// cycle puts a sandbox to sleep with touched MiB of fresh memory and wakes it up to its first command.
func cycle(ctx context.Context, c *rest.Client, sb rest.Sandbox, touched int) error {
	for _, s := range timeSleep(ctx, c, sb, touched) {
		if s.err != nil {
			return s.err
		}
	}
	return nil
}

// worstFootprint is the largest of all VMMs that run, or of those that wait for a machine, in MiB.
func worstFootprint(waiting bool) (float64, error) {
	pids, err := vmms(waiting)
	if err != nil {
		return 0, err
	}
	if len(pids) == 0 {
		return 0, errors.New("no torpor-vmm runs")
	}
	var worst uint64
	for _, pid := range pids {
		f, err := os.Open(fmt.Sprintf("/proc/%d/smaps", pid))
		if err != nil {
			return 0, fmt.Errorf("reading the memory map of a VMM: %w", err)
		}
		own, guest, err := parseSmaps(f)
		f.Close()
		if err != nil {
			return 0, fmt.Errorf("reading the memory map of VMM %d: %w", pid, err)
		}
		if guest == 0 && !waiting {
			return 0, fmt.Errorf("VMM %d has no guest memory that this program knows", pid)
		}
		worst = max(worst, own)
	}
	return float64(worst) / (1 << 20), nil
}

// vmms returns the process ids of the torpor-vmm processes, by the name of their program: those that have a machine, or those that
// wait for one in the agent's pool (agent/vmproc, StartAhead).
func vmms(waiting bool) ([]int, error) {
	names, err := filepath.Glob("/proc/[0-9]*/comm")
	if err != nil {
		return nil, err
	}
	var pids []int
	for _, name := range names {
		comm, err := os.ReadFile(name)
		if err != nil || strings.TrimSpace(string(comm)) != "torpor-vmm" {
			continue // gone meanwhile, or another program
		}
		args, err := os.ReadFile(filepath.Join(filepath.Dir(name), "cmdline"))
		if err != nil || strings.Contains(string(args), "/ahead-") != waiting {
			continue
		}
		pid, err := strconv.Atoi(filepath.Base(filepath.Dir(name)))
		if err != nil {
			return nil, err
		}
		pids = append(pids, pid)
	}
	return pids, nil
}

// mapping is one area of a process's memory.
type mapping struct {
	begin, end uint64
	pss        uint64 // bytes
	path       string
}

// isGuest says that the area maps the memory file of a template or of a snapshot.
func (m mapping) isGuest() bool {
	name := filepath.Base(strings.TrimSuffix(m.path, " (deleted)"))
	return name == "mem" || name == "mem.diff"
}

// parseSmaps adds up the proportional set sizes (proc_pid_smaps(5)) of guest memory and of everything else, in bytes. Guest
// memory is what is mapped from memory files, and the zero pages between such mappings.
func parseSmaps(r io.Reader) (own, guest uint64, err error) {
	var all []mapping
	for lines := bufio.NewScanner(r); lines.Scan(); {
		fields := strings.Fields(lines.Text())
		if len(fields) == 0 {
			continue
		}
		if from, to, ok := strings.Cut(fields[0], "-"); ok && len(fields) >= 5 {
			begin, err1 := strconv.ParseUint(from, 16, 64)
			end, err2 := strconv.ParseUint(to, 16, 64)
			if err := errors.Join(err1, err2); err != nil {
				return 0, 0, err
			}
			all = append(all, mapping{begin: begin, end: end, path: strings.Join(fields[5:], " ")})
			continue
		}
		if fields[0] == "Pss:" && len(fields) == 3 && len(all) > 0 {
			kib, err := strconv.ParseUint(fields[1], 10, 64)
			if err != nil {
				return 0, 0, err
			}
			all[len(all)-1].pss = kib << 10
		}
	}
	slices.SortFunc(all, func(a, b mapping) int { return int(a.begin>>12) - int(b.begin>>12) })
	for i, m := range all {
		between := m.path == "" && i > 0 && i+1 < len(all) && all[i-1].end == m.begin && m.end == all[i+1].begin &&
			all[i-1].isGuest() && all[i+1].isGuest()
		if m.isGuest() || between {
			guest += m.pss
		} else {
			own += m.pss
		}
	}
	return own, guest, nil
}
