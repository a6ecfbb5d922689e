package main

import (
	"fmt"
	"io"
	"slices"
	"strconv"
	"strings"
	"text/tabwriter"
)

// figure is one measurement of one round.
type figure struct {
	vmm, name, unit string
	value           float64
	amount          float64 // of the unit, moved meanwhile; only a profile needs it
}

// String is the line that measure writes and parseFigures reads.
func (f figure) String() string { return fmt.Sprintf("%s %s %g %s", f.vmm, f.name, f.value, f.unit) }

func parseFigures(text string) ([]figure, error) {
	var out []figure
	for line := range strings.Lines(text) {
		fields := strings.Fields(line)
		if len(fields) != 4 {
			return nil, fmt.Errorf("%q is no figure", line)
		}
		v, err := strconv.ParseFloat(fields[2], 64)
		if err != nil {
			return nil, fmt.Errorf("%q is no figure: %w", line, err)
		}
		out = append(out, figure{vmm: fields[0], name: fields[1], unit: fields[3], value: v})
	}
	return out, nil
}

// median is of the values of one VMM under one name; ok is false if there are none.
func median(all []figure, vmm, name string) (v float64, ok bool) {
	var values []float64
	for _, f := range all {
		if f.vmm == vmm && f.name == name {
			values = append(values, f.value)
		}
	}
	if len(values) == 0 {
		return 0, false
	}
	slices.Sort(values)
	return values[(len(values)-1)/2], true
}

// report prints every figure beside the peer's. The ratio is how many times better torpor-vmm is; a count of exits is better
// when it is smaller.
func report(w io.Writer, all []figure, least float64) error {
	table := tabwriter.NewWriter(w, 0, 0, 2, ' ', tabwriter.AlignRight)
	fmt.Fprintln(table, "\ttorpor-vmm\tQEMU\tunit\tratio\t")
	var seen, worse []string
	for _, f := range all {
		if slices.Contains(seen, f.name) {
			continue
		}
		seen = append(seen, f.name)
		ours, ok1 := median(all, torporName, f.name)
		theirs, ok2 := median(all, peerName, f.name)
		if !ok1 || !ok2 || ours == 0 || theirs == 0 {
			return fmt.Errorf("%s was measured on one side only", f.name)
		}
		ratio := ours / theirs
		if f.unit == exitsUnit {
			ratio = theirs / ours
		}
		fmt.Fprintf(table, "%s\t%.1f\t%.1f\t%s\t%.2f\t\n", f.name, ours, theirs, f.unit, ratio)
		if ratio < least {
			worse = append(worse, fmt.Sprintf("%s %.2f", f.name, ratio))
		}
	}
	if err := table.Flush(); err != nil {
		return err
	}
	if len(worse) > 0 {
		return fmt.Errorf("below %.2f of the peer: %s", least, strings.Join(worse, ", "))
	}
	return nil
}
