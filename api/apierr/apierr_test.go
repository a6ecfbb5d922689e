package apierr

import (
	"errors"
	"io/fs"
	"testing"
)

func TestEveryCodeCrossesTtrpcUnchanged(t *testing.T) {
	for code := range kinds {
		in := New(code, "sandbox %q: do this", "x").For("i1").With("running", "starting")
		in.RetryAfter = 7
		out := As(FromStatus(ToStatus(in)))
		if out.Body() != in.Body() || out.RetrySeconds() != in.RetrySeconds() {
			t.Errorf("%s: got %+v, want %+v", code, out.Body(), in.Body())
		}
	}
}

func TestRetryAfterOnEvery429And503(t *testing.T) {
	for code := range kinds {
		e := New(code, "m")
		want := e.HTTP() == 429 || e.HTTP() == 503
		if got := e.RetrySeconds() > 0; got != want {
			t.Errorf("%s (%d): Retry-After present = %v, want %v", code, e.HTTP(), got, want)
		}
	}
}

func TestForeignErrorsBecomeInternalAndKeepTheirCause(t *testing.T) {
	e := As(New(NotFound, "reading: %w", fs.ErrNotExist))
	if !errors.Is(e, fs.ErrNotExist) || !errors.Is(e, &Error{Code: NotFound}) {
		t.Errorf("cause or code lost: %v", e)
	}
	if As(fs.ErrPermission).Code != Internal {
		t.Error("a foreign error must be internal")
	}
	if got := FromStatus(fs.ErrPermission); !errors.Is(got, fs.ErrPermission) {
		t.Error("an error of another origin must be returned as it is")
	}
}
