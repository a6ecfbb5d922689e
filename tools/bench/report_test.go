package main

import (
	"bytes"
	"encoding/csv"
	"errors"
	"reflect"
	"strings"
	"testing"
	"time"
)

func TestPercentile(t *testing.T) {
	var hundred []time.Duration
	for i := range 100 {
		hundred = append(hundred, time.Duration(i+1))
	}
	for _, c := range []struct {
		in   []time.Duration
		p    int
		want time.Duration
	}{{nil, 50, 0}, {hundred[:1], 99, 1}, {hundred[:3], 50, 2}, {hundred[:4], 50, 2}, {hundred, 50, 50}, {hundred, 95, 95}, {hundred, 99, 99}} {
		if got := percentile(c.in, c.p); got != c.want {
			t.Errorf("p%d of %d: %d, want %d", c.p, len(c.in), got, c.want)
		}
	}
}

func TestSamplesSurviveTheCSV(t *testing.T) {
	in := []sample{
		{scenario: fromTemplate, round: 1, total: 1500 * time.Microsecond, phases: []phase{{"create", time.Millisecond}, {"command", 500 * time.Microsecond}}},
		{scenario: pausing, round: 2, bytes: 42, shape: shape{2, 512}, err: errors.New("a \"quoted\",\nlong story")},
	}
	var buf bytes.Buffer
	w := csv.NewWriter(&buf)
	w.Write(csvHeader)
	for _, s := range in {
		w.Write(s.fields())
	}
	w.Flush()
	out, err := readSamples(&buf)
	if err != nil || !reflect.DeepEqual(in, out) {
		t.Errorf("%v: got %+v, want %+v", err, out, in)
	}
	for _, bad := range []string{"", "a,b\n", strings.Join(csvHeader, ",") + "\nx,one,2,,0,,1,1\n", strings.Join(csvHeader, ",") + "\nx,1,2,p,0,,1,1\n", strings.Join(csvHeader, ",") + "\nx,1,2,,0,,one,1\n"} {
		if _, err := readSamples(strings.NewReader(bad)); err == nil {
			t.Errorf("%q was read", bad)
		}
	}
}

func TestReport(t *testing.T) {
	round := func(n int, warm, cold time.Duration) []sample {
		return []sample{
			{scenario: fromTemplate, round: n, total: warm},
			{scenario: coldBoot, round: n, total: cold},
			{scenario: fromPause, round: n, total: warm},
			{scenario: pausing, round: n, total: warm, bytes: 30 << 20},
		}
	}
	good := append(round(0, time.Hour, time.Second), round(1, time.Second, 8*time.Second)...) // the warm-up does not count
	var out bytes.Buffer
	if err := report(&out, good, conditions{emulated: true}, 5); err != nil {
		t.Error(err)
	}
	for _, want := range []string{"8.0 times faster", "emulated", "30.0 MiB"} {
		if !strings.Contains(out.String(), want) {
			t.Errorf("no %q in:\n%s", want, out.String())
		}
	}
	if err := report(&out, good, conditions{}, 9); err == nil {
		t.Error("a ratio below the least was accepted")
	}
	failed := append(good, sample{scenario: coldBoot, round: 2, err: errors.New("lost")})
	if err := report(&out, failed, conditions{}, 5); err == nil || !strings.Contains(err.Error(), "lost") {
		t.Errorf("a failed measurement was accepted: %v", err)
	}
	if err := report(&out, nil, conditions{}, 0); err == nil {
		t.Error("nothing was reported as something")
	}
}
