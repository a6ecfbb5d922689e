package main

import (
	"encoding/csv"
	"errors"
	"fmt"
	"io"
	"slices"
	"strconv"
	"strings"
	"text/tabwriter"
	"time"
)

// conditions are what the numbers hold for.
type conditions struct {
	host            string
	emulated        bool
	touched, rounds int
}

// readSamples reads what measure wrote.
func readSamples(r io.Reader) ([]sample, error) {
	rows, err := csv.NewReader(r).ReadAll()
	if err != nil {
		return nil, fmt.Errorf("reading the measurements: %w", err)
	}
	if len(rows) == 0 || !slices.Equal(rows[0], csvHeader) {
		return nil, errors.New("reading the measurements: they do not begin with the header")
	}
	out := make([]sample, 0, len(rows)-1)
	for _, row := range rows[1:] {
		round, err1 := strconv.Atoi(row[1])
		total, err2 := strconv.ParseInt(row[2], 10, 64)
		stored, err3 := strconv.ParseInt(row[4], 10, 64)
		phases, err4 := parsePhases(row[3])
		vcpus, err5 := strconv.Atoi(row[6])
		memory, err6 := strconv.Atoi(row[7])
		if err := errors.Join(err1, err2, err3, err4, err5, err6); err != nil {
			return nil, fmt.Errorf("reading the measurements: %w", err)
		}
		s := sample{scenario: row[0], round: round, total: time.Duration(total) * time.Microsecond, phases: phases, bytes: stored, shape: shape{vcpus, memory}}
		if row[5] != "" {
			s.err = errors.New(row[5])
		}
		out = append(out, s)
	}
	return out, nil
}

func parsePhases(text string) ([]phase, error) {
	var out []phase
	for field := range strings.FieldsSeq(text) {
		name, us, _ := strings.Cut(field, "=")
		n, err := strconv.ParseInt(us, 10, 64)
		if err != nil {
			return nil, fmt.Errorf("phase %q: %w", field, err)
		}
		out = append(out, phase{name, time.Duration(n) * time.Microsecond})
	}
	return out, nil
}

// series are the good totals of one scenario, sorted, without the warm-up.
func series(samples []sample, scenario string) (good []time.Duration, failed []error) {
	for _, s := range samples {
		switch {
		case s.scenario != scenario || s.round == 0:
		case s.err != nil:
			failed = append(failed, s.err)
		default:
			good = append(good, s.total)
		}
	}
	slices.Sort(good)
	return good, failed
}

// percentile is by nearest rank; 0 of nothing.
func percentile(sorted []time.Duration, p int) time.Duration {
	if len(sorted) == 0 {
		return 0
	}
	rank := (len(sorted)*p + 99) / 100
	return sorted[max(rank, 1)-1]
}

// print tells what the numbers hold for.
func (c conditions) print(w io.Writer, samples []sample, how string) {
	kind := "hardware KVM"
	if c.emulated {
		kind = "emulated host: absolute times mean nothing elsewhere, ratios do"
	}
	var machine shape
	if len(samples) > 0 {
		machine = samples[0].shape
	}
	fmt.Fprintf(w, "\nhost: %s (%s)\nguest: vCPUs %d, %d MiB, Debian kernel, %s; %d rounds\n\n",
		c.host, kind, machine.vcpus, machine.memoryMiB, how, c.rounds)
}

// tabulate prints a line a scenario and returns what failed.
func tabulate(w io.Writer, samples []sample, scenarios []string) (failures []error, err error) {
	table := tabwriter.NewWriter(w, 0, 0, 2, ' ', tabwriter.AlignRight)
	fmt.Fprintln(table, "to first command\tp50\tp95\tp99\tfailed\tphases (median)\t")
	for _, scenario := range scenarios {
		good, failed := series(samples, scenario)
		failures = append(failures, failed...)
		fmt.Fprintf(table, "%s\t%s\t%s\t%s\t%d\t%s\t\n", scenario,
			seconds(percentile(good, 50)), seconds(percentile(good, 95)), seconds(percentile(good, 99)), len(failed), medianPhases(samples, scenario))
	}
	return failures, table.Flush()
}

// report prints the table and the ratio, and fails if a measurement failed or the ratio is below least.
func report(w io.Writer, samples []sample, c conditions, least float64) error {
	c.print(w, samples, fmt.Sprintf("%d MiB touched before a pause; sequential, each on a quiet host, page cache warm", c.touched))
	failures, err := tabulate(w, samples, []string{fromTemplate, fromPause, coldBoot, pausing})
	if err != nil {
		return err
	}
	if n := medianBytes(samples); n > 0 {
		fmt.Fprintf(w, "\na pause stored %.1f MiB (median)\n", float64(n)/(1<<20))
	}
	warm, _ := series(samples, fromTemplate)
	cold, _ := series(samples, coldBoot)
	if len(warm) == 0 || len(cold) == 0 {
		return errors.Join(append([]error{errors.New("there is nothing to compare")}, failures...)...)
	}
	ratio := float64(percentile(cold, 50)) / float64(percentile(warm, 50))
	fmt.Fprintf(w, "starting from the template is %.1f times faster than a cold boot (medians of one run)\n", ratio)
	if ratio < least {
		failures = append(failures, fmt.Errorf("the ratio %.1f is below %.1f", ratio, least))
	}
	return errors.Join(failures...)
}

func seconds(d time.Duration) string { return fmt.Sprintf("%.3f s", d.Seconds()) }

func medianPhases(samples []sample, scenario string) string {
	var order []string
	byName := map[string][]time.Duration{}
	for _, s := range samples {
		if s.scenario != scenario || s.round == 0 || s.err != nil {
			continue
		}
		for _, p := range s.phases {
			if byName[p.name] == nil {
				order = append(order, p.name)
			}
			byName[p.name] = append(byName[p.name], p.took)
		}
	}
	parts := make([]string, 0, len(order))
	for _, name := range order {
		slices.Sort(byName[name])
		parts = append(parts, name+" "+seconds(percentile(byName[name], 50)))
	}
	return strings.Join(parts, ", ")
}

func medianBytes(samples []sample) int64 {
	var all []int64
	for _, s := range samples {
		if s.scenario == pausing && s.round > 0 && s.err == nil {
			all = append(all, s.bytes)
		}
	}
	if len(all) == 0 {
		return 0
	}
	slices.Sort(all)
	return all[(len(all)-1)/2]
}
