package hop

import (
	"errors"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
)

// What a client is told of its connection depends on how much of its request was read when the answer began.
func TestAnnounce(t *testing.T) {
	for name, c := range map[string]struct {
		body  io.Reader
		read  int64
		close bool
	}{
		"no body":          {nil, 0, false},
		"unread":           {strings.NewReader("four"), 0, true},
		"read in part":     {strings.NewReader("four"), 2, true},
		"read to its end":  {strings.NewReader("four"), 5, false},
		"empty, unknown":   {struct{ io.Reader }{strings.NewReader("")}, 0, true},
		"empty, then read": {struct{ io.Reader }{strings.NewReader("")}, 1, false},
	} {
		t.Run(name, func(t *testing.T) {
			w := httptest.NewRecorder()
			r := Begin(w, httptest.NewRequest(http.MethodPost, "/", c.body))
			if _, err := io.CopyN(io.Discard, r.Body, c.read); err != nil && !errors.Is(err, io.EOF) {
				t.Fatal(err)
			}
			Announce(r, w.Header())
			if got := w.Header().Get("Connection") == "close"; got != c.close {
				t.Errorf("announces the end of the connection: %v, want %v", got, c.close)
			}
		})
	}
}

func TestStripTakesOurHeadersOnly(t *testing.T) {
	h := http.Header{"Torpor-Sandbox": {"x"}, "torpor-port": {"1"}, "Torporific": {"kept"}}
	if Strip(h); len(h) != 1 || h.Get("Torporific") != "kept" {
		t.Errorf("left: %v", h)
	}
}
