package hop

import (
	"bufio"
	"errors"
	"io"
	"net"
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

// A client may be slow to send the rest of a request that is answered already. The connection is not closed under it.
func TestFinishTakesTheRest(t *testing.T) {
	taken := make(chan bool, 1)
	srv := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		r = Begin(w, r)
		Announce(r, w.Header())
		w.Header().Set("Content-Length", "0") // or the answer has no end before the handler's
		w.WriteHeader(http.StatusBadGateway)
		Finish(w, r)
		taken <- r.Body.(*watched).ended.Load()
	}))
	defer srv.Close()
	c, err := net.Dial("tcp", srv.Listener.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	io.WriteString(c, "POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 4\r\n\r\nab")
	res, err := http.ReadResponse(bufio.NewReader(c), nil)
	if err != nil || res.StatusCode != http.StatusBadGateway || !res.Close {
		t.Fatalf("%v, %v", res, err)
	}
	res.Body.Close()
	io.WriteString(c, "cd")
	if !<-taken {
		t.Error("the rest of the request was not taken")
	}
}

func TestStripTakesOurHeadersOnly(t *testing.T) {
	h := http.Header{"Torpor-Sandbox": {"x"}, "torpor-port": {"1"}, "Torporific": {"kept"}}
	if Strip(h); len(h) != 1 || h.Get("Torporific") != "kept" {
		t.Errorf("left: %v", h)
	}
}
