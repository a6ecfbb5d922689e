package main

import "testing"

func TestParseProcessors(t *testing.T) {
	got, err := parseProcessors("cpu  10 1 20 300 5 1 2 4 7 0\ncpu0 1 1\n")
	if want := (processorTime{idle: 300, total: 343}); err != nil || got != want {
		t.Errorf("%+v, %v; want %+v", got, err, want)
	}
	for _, bad := range []string{"", "cpu 1 2 3", "cpu0 1 2 3 4 5 6 7 8 9", "cpu 1 2 x 4 5 6 7 8 9"} {
		if got, err := parseProcessors(bad); err == nil {
			t.Errorf("%q was read as %+v", bad, got)
		}
	}
}

func TestIdleShare(t *testing.T) {
	base := processorTime{idle: 100, total: 200}
	for _, c := range []struct {
		later processorTime
		want  float64
	}{{processorTime{145, 250}, 0.9}, {processorTime{150, 250}, 1}, {processorTime{100, 250}, 0}, {base, 0}, {processorTime{90, 190}, 0}} {
		if got := base.idleShare(c.later); got != c.want {
			t.Errorf("%+v: %v, want %v", c.later, got, c.want)
		}
	}
}
