package sandbox

import (
	"errors"
	"slices"
	"testing"
)

func TestEveryPairOfStates(t *testing.T) {
	for _, from := range append([]VMState{""}, States...) {
		for _, to := range States {
			err := checkMove(from, to)
			if slices.Contains(next[from], to) {
				if err != nil {
					t.Errorf("%s -> %s: %v", from, to, err)
				}
				continue
			}
			var illegal *TransitionError
			if !errors.As(err, &illegal) || illegal.From != from || illegal.To != to {
				t.Errorf("%s -> %s: got %v", from, to, err)
			}
		}
	}
}

func TestKillIsLegalFromEveryStateAndFinal(t *testing.T) {
	for _, from := range States {
		if from == Stopping {
			continue
		}
		if err := checkMove(from, Stopping); err != nil {
			t.Error(err)
		}
	}
	if got := next[Stopping]; !slices.Equal(got, []VMState{Stopped}) {
		t.Errorf("stopping leads to %v", got)
	}
}

func TestRunningIsReachedOnlyThroughAStart(t *testing.T) {
	for from, tos := range next {
		if slices.Contains(tos, Running) && from != Creating && from != Resuming && from != Pausing {
			t.Errorf("%s -> running", from)
		}
	}
}
