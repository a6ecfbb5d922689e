package usage

import (
	"testing"
	"time"
)

func TestSample(t *testing.T) {
	var m Meter
	s, err := m.Sample(time.Unix(1700000000, 0))
	if err != nil {
		t.Fatal(err)
	}
	if s.Time != 1700000000 || s.CPUCount < 1 || s.MemTotal == 0 || s.MemUsed == 0 || s.MemUsed > s.MemTotal ||
		s.DiskTotal == 0 || s.DiskUsed > s.DiskTotal || s.MemTotalMB != s.MemTotal>>20 || s.CPUPercent < 0 || s.CPUPercent > 100 {
		t.Errorf("%+v", s)
	}
}

func TestPercentIsOfTheLastInterval(t *testing.T) {
	var m Meter
	for _, step := range []struct {
		now  ticks
		want float64
	}{{ticks{50, 100}, 50}, {ticks{50, 200}, 0}, {ticks{150, 300}, 100}, {ticks{150, 300}, 0}, {ticks{10, 320}, 0}} {
		if got := m.percent(step.now); got != step.want {
			t.Errorf("%+v: %v, want %v", step.now, got, step.want)
		}
	}
}

func TestParse(t *testing.T) {
	got, err := parseStat("cpu  1 2 3 10 20 4 5 6 100 0\ncpu0 …\n")
	if err != nil || got != (ticks{busy: 21, total: 51}) {
		t.Errorf("%+v, %v", got, err)
	}
	for _, bad := range []string{"", "cpu 1", "cpu a b c d e f g h", "intr 1 2 3 4 5 6 7 8 9"} {
		if _, err := parseStat(bad); err == nil {
			t.Errorf("%q was understood", bad)
		}
	}
	mem := parseMeminfo("MemTotal:  2 kB\nHugePages_Total:  3\nBad\nEmpty:\n")
	if mem["MemTotal"] != 2048 || len(mem) != 2 {
		t.Errorf("%v", mem)
	}
}
