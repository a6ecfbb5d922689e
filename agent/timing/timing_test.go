package timing_test

import (
	"math"
	"reflect"
	"testing"
	"time"

	"torpor/agent/timing"
)

func TestEveryBudgetIsSetAndNoneShrinksOnASlowHost(t *testing.T) {
	fast, err := timing.New(1)
	if err != nil {
		t.Fatal(err)
	}
	slow, err := timing.New(10)
	if err != nil {
		t.Fatal(err)
	}
	f, s := reflect.ValueOf(fast), reflect.ValueOf(slow)
	for i := range f.NumField() {
		name := f.Type().Field(i).Name
		a, b := f.Field(i).Interface().(time.Duration), s.Field(i).Interface().(time.Duration)
		if a <= 0 || b < a {
			t.Errorf("%s: %v on a fast host, %v on a slow one", name, a, b)
		}
	}
}

func TestBadFactorsAreRefused(t *testing.T) {
	for _, f := range []float64{0, -1, 0.5, 1001, math.NaN(), math.Inf(1)} {
		if _, err := timing.New(f); err == nil {
			t.Errorf("factor %v accepted", f)
		}
	}
}
