package main

import (
	"errors"
	"fmt"
	"io"
)

// reportRestores prints the table and the ratios that are promised, and fails if one is missed.
func reportRestores(w io.Writer, samples []sample, c conditions) error {
	c.print(w, samples, "from the template to the output of a first command, past agent and control plane; interleaved, each on a quiet host")
	names := make([]string, len(variants))
	for i, v := range variants {
		names[i] = v.name
	}
	failures, err := tabulate(w, samples, names)
	if err != nil {
		return err
	}
	for _, r := range []struct {
		what, slow, fast string
		least            float64
	}{
		{"the working set makes a cold start", "cold, ahead", "cold, ahead, working set", 2},
		{"the working set makes a warm start", "warm, ahead", "warm, ahead, working set", 0.95},
		{"beside QEMU, a warm start is", "warm, QEMU", "warm, ahead, working set", 5},
		{"beside QEMU, a cold start is", "cold, QEMU", "cold, ahead, working set", 5},
		{"what is made ahead makes a warm start", "warm, working set", "warm, ahead, working set", 1},
	} {
		slow, _ := series(samples, r.slow)
		fast, _ := series(samples, r.fast)
		if len(slow) == 0 || len(fast) == 0 {
			failures = append(failures, fmt.Errorf("%s: there is nothing to compare", r.what))
			continue
		}
		ratio := float64(percentile(slow, 50)) / float64(percentile(fast, 50))
		fmt.Fprintf(w, "%s %.2f times faster (medians of one run; wanted: %.2f)\n", r.what, ratio, r.least)
		if ratio < r.least {
			failures = append(failures, fmt.Errorf("%s %.2f times faster, not %.2f times", r.what, ratio, r.least))
		}
	}
	return errors.Join(failures...)
}
