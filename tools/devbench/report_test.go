package main

import (
	"reflect"
	"strings"
	"testing"
)

func TestReport(t *testing.T) {
	in := []figure{
		{vmm: torporName, name: "exits", unit: exitsUnit, value: 4000},
		{vmm: peerName, name: "exits", unit: exitsUnit, value: 8000},
		{vmm: torporName, name: "read", unit: "MiB/s", value: 50},
		{vmm: torporName, name: "read", unit: "MiB/s", value: 90},
		{vmm: torporName, name: "read", unit: "MiB/s", value: 70},
		{vmm: peerName, name: "read", unit: "MiB/s", value: 100},
	}
	var text strings.Builder
	for _, f := range in {
		text.WriteString(f.String() + "\n")
	}
	out, err := parseFigures(text.String())
	if err != nil || !reflect.DeepEqual(in, out) {
		t.Fatalf("%+v, %v", out, err)
	}
	var table strings.Builder
	if err := report(&table, out, 0.5); err != nil {
		t.Error(err)
	}
	if got := table.String(); !strings.Contains(got, "0.70") || !strings.Contains(got, "2.00") {
		t.Errorf("report:\n%s", got)
	}
	if err := report(&table, out, 0.8); err == nil || !strings.Contains(err.Error(), "read 0.70") {
		t.Errorf("a ratio of 0.7 passed 0.8: %v", err)
	}
	if err := report(&table, in[:1], 0); err == nil {
		t.Error("a figure of one side was reported")
	}
	for _, bad := range []string{"a b c\n", "a b c d\n", "x\n"} {
		if _, err := parseFigures(bad); err == nil {
			t.Errorf("%q was read", bad)
		}
	}
}
