package main

import (
	"context"
	"encoding/csv"
	"fmt"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"torpor/tools/rest"
)

// The scenarios, each from the request to the output of a first command, and the pause.
const (
	fromTemplate = "create from template"
	fromPause    = "resume from pause"
	coldBoot     = "cold boot"
	pausing      = "pause"
)

// roundBudget bounds one round on a very slow host.
const roundBudget = 15 * time.Minute

// sample is one measurement. A failed one counts and has no time.
type sample struct {
	scenario string
	round    int // 0 is the warm-up
	phases   []phase
	total    time.Duration
	bytes    int64 // stored by a pause
	shape    shape
	err      error
}

// shape is what every machine of a run has.
type shape struct{ vcpus, memoryMiB int }

// phase is a part of a total.
type phase struct {
	name string
	took time.Duration
}

// csvHeader names the columns measure writes; readSamples reads them back.
var csvHeader = []string{"scenario", "round", "total_us", "phases_us", "bytes", "error", "vcpus", "memory_mib"}

// client speaks to the control plane of this host.
func client(o options) (*rest.Client, error) {
	key, err := os.ReadFile(filepath.Join(o.data, "controlplane", "api-key"))
	if err != nil {
		return nil, fmt.Errorf("reading the API key: %w", err)
	}
	return &rest.Client{API: o.api, Key: strings.TrimSpace(string(key)), HTTP: &http.Client{}}, nil
}

// measure runs all rounds and writes one CSV line a sample, as they come.
func measure(ctx context.Context, o options, w io.Writer) error {
	c, err := client(o)
	if err != nil {
		return err
	}
	base, err := c.Template(ctx, "base")
	if err != nil {
		return err
	}
	machine := shape{base.CPUCount, base.MemoryMB}
	boot, err := newBooter(o, machine)
	if err != nil {
		return err
	}
	defer boot.close()
	out := csv.NewWriter(w)
	if err := out.Write(csvHeader); err != nil {
		return err
	}
	for round := range o.rounds + 1 {
		for _, s := range oneRound(ctx, c, boot, o.touched) {
			s.round, s.shape = round, machine
			if err := out.Write(s.fields()); err != nil {
				return err
			}
		}
		out.Flush()
		if err := out.Error(); err != nil {
			return err
		}
		if ctx.Err() != nil {
			return ctx.Err()
		}
		fmt.Fprintf(os.Stderr, "round %d of %d\n", round, o.rounds)
	}
	return nil
}

// oneRound measures every scenario once, interleaved, so that a disturbance of the host meets all of them alike. Each
// begins on a quiet host.
func oneRound(ctx context.Context, c *rest.Client, boot *booter, touched int) []sample {
	ctx, cancel := context.WithTimeout(ctx, roundBudget)
	defer cancel()
	created, sb := timeCreate(ctx, c)
	out := []sample{created}
	if created.err == nil {
		out = append(out, timeSleep(ctx, c, sb, touched)...)
		if err := c.Kill(ctx, sb.SandboxID); err != nil {
			out[len(out)-1].err = fmt.Errorf("kill: %w", err)
		}
	}
	return append(out, boot.measure(ctx))
}

func timeCreate(ctx context.Context, c *rest.Client) (sample, rest.Sandbox) {
	s := sample{scenario: fromTemplate}
	if s.err = quiet(ctx); s.err != nil {
		return s, rest.Sandbox{}
	}
	w := watch{began: time.Now()}
	sb, err := c.Create(ctx, rest.NewSandbox{TemplateID: "base", Timeout: int(roundBudget.Seconds()), Metadata: map[string]string{"by": "bench"}})
	w.lap("create")
	if err == nil {
		_, err = c.Output(ctx, sb, firstCommand)
		w.lap("command")
	}
	s.phases, s.total, s.err = w.phases, w.total(), err
	return s, sb
}

// timeSleep touches memory, pauses and wakes.
func timeSleep(ctx context.Context, c *rest.Client, sb rest.Sandbox, touched int) []sample {
	p, r := sample{scenario: pausing}, sample{scenario: fromPause}
	touch := fmt.Sprintf(`setsid -f python3 -c 'import os,time; b=[os.urandom(1<<20) for _ in range(%d)]; open("/tmp/touched","w").close(); time.sleep(1e6)' </dev/null >/dev/null 2>&1
until [ -e /tmp/touched ]; do sleep 0.1; done`, touched)
	if _, p.err = c.Output(ctx, sb, touch); p.err != nil {
		return []sample{p}
	}
	if p.err = quiet(ctx); p.err != nil {
		return []sample{p}
	}
	w := watch{began: time.Now()}
	p.err = c.Pause(ctx, sb.SandboxID)
	w.lap("pause")
	p.phases, p.total = w.phases, w.total()
	if p.err != nil {
		return []sample{p}
	}
	if state, err := c.State(ctx, sb.SandboxID); err == nil {
		p.bytes = state.Memory.SnapshotBytes
	}
	if r.err = quiet(ctx); r.err != nil {
		return []sample{p, r}
	}
	w = watch{began: time.Now()}
	sb, _, r.err = c.Connect(ctx, sb.SandboxID, roundBudget)
	w.lap("connect")
	if r.err == nil {
		_, r.err = c.Output(ctx, sb, firstCommand)
		w.lap("command")
	}
	r.phases, r.total = w.phases, w.total()
	return []sample{p, r}
}

// firstCommand is the same everywhere.
const firstCommand = "echo first"

// watch is a stop watch with laps.
type watch struct {
	began, last time.Time
	phases      []phase
	count       int64 // of faults, where they are counted
}

func (w *watch) lap(name string) {
	now := time.Now()
	if w.last.IsZero() {
		w.last = w.began
	}
	w.phases = append(w.phases, phase{name, now.Sub(w.last)})
	w.last = now
}

func (w *watch) total() time.Duration { return w.last.Sub(w.began) }

func (s sample) fields() []string {
	parts := make([]string, len(s.phases))
	for i, p := range s.phases {
		parts[i] = fmt.Sprintf("%s=%d", p.name, p.took.Microseconds())
	}
	failure := ""
	if s.err != nil {
		failure = s.err.Error()
	}
	return []string{
		s.scenario, strconv.Itoa(s.round), strconv.FormatInt(s.total.Microseconds(), 10), strings.Join(parts, " "),
		strconv.FormatInt(s.bytes, 10), failure, strconv.Itoa(s.shape.vcpus), strconv.Itoa(s.shape.memoryMiB),
	}
}
