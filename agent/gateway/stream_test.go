package gateway_test

import (
	"bufio"
	"context"
	"errors"
	"io"
	"net"
	"net/http"
	"strings"
	"sync/atomic"
	"testing"
)

func TestAnswersAreNotBuffered(t *testing.T) {
	next := make(chan struct{})
	_, url := start(t, func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", "application/connect+json")
		for range 3 {
			io.WriteString(w, "event\n")
			http.NewResponseController(w).Flush()
			<-next // the client has read it
		}
	})
	lines := bufio.NewReader(do(t, request(t, "GET", url, "49983")).Body)
	for range 3 {
		if line, err := lines.ReadString('\n'); line != "event\n" {
			t.Fatal(line, err)
		}
		next <- struct{}{}
	}
	if _, err := lines.ReadByte(); !errors.Is(err, io.EOF) {
		t.Errorf("a stream that ended well: %v", err)
	}
}

func TestBothWaysAtOnce(t *testing.T) {
	_, url := start(t, func(w http.ResponseWriter, r *http.Request) {
		c := http.NewResponseController(w)
		c.EnableFullDuplex()
		c.Flush()
		in := bufio.NewReader(r.Body)
		for {
			line, err := in.ReadString('\n')
			if err != nil {
				return
			}
			io.WriteString(w, "echo "+line)
			c.Flush()
		}
	})
	r := request(t, "POST", url, "8080")
	body, feed := io.Pipe()
	r.Body = body
	out := bufio.NewReader(do(t, r).Body)
	for _, line := range []string{"one\n", "two\n"} {
		io.WriteString(feed, line)
		if got, err := out.ReadString('\n'); got != "echo "+line {
			t.Fatal(got, err)
		}
	}
	feed.Close()
	if _, err := out.ReadByte(); !errors.Is(err, io.EOF) {
		t.Error(err)
	}
}

func TestExpectContinueIsTheGuestsToAnswer(t *testing.T) {
	_, url := start(t, func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path == "/refuse" {
			w.WriteHeader(http.StatusForbidden) // without reading: the body must not be asked for
			return
		}
		io.Copy(w, r.Body)
	})
	for path, want := range map[string]string{"/refuse": "HTTP/1.1 403", "/take": "HTTP/1.1 100"} {
		conn, err := net.Dial("tcp", strings.TrimPrefix(url, "http://"))
		if err != nil {
			t.Fatal(err)
		}
		defer conn.Close()
		io.WriteString(conn, "POST "+path+" HTTP/1.1\r\nHost: x\r\nTorpor-Sandbox: "+sandboxID+
			"\r\nTorpor-Port: 8080\r\nExpect: 100-continue\r\nContent-Length: 4\r\n\r\n")
		if line, err := bufio.NewReader(conn).ReadString('\n'); !strings.HasPrefix(line, want) {
			t.Errorf("%s: %q %v", path, line, err)
		}
	}
}

// Without a clean end a client must not take what came for everything.
func TestGuestThatDiesMidStreamAbortsTheClient(t *testing.T) {
	for name, die := range map[string]func(n *node, w http.ResponseWriter){
		"connection cut": func(_ *node, w http.ResponseWriter) { panic(http.ErrAbortHandler) },
		"lease ended":    func(n *node, w http.ResponseWriter) { close(n.done) },
	} {
		for _, length := range []string{"", "100"} {
			var n *node
			read, never := make(chan struct{}), make(chan struct{})
			n, url := start(t, func(w http.ResponseWriter, r *http.Request) {
				if length != "" {
					w.Header().Set("Content-Length", length)
				}
				io.WriteString(w, "half")
				http.NewResponseController(w).Flush()
				<-read
				die(n, w)
				select {
				case <-never:
				case <-r.Context().Done():
				}
			})
			res := do(t, request(t, "GET", url, "8080"))
			io.ReadFull(res.Body, make([]byte, 4))
			close(read)
			if _, err := io.ReadAll(res.Body); !errors.Is(err, io.ErrUnexpectedEOF) {
				t.Errorf("%s, length %q: the stream ended with %v", name, length, err)
			}
		}
	}
}

// The client is in the middle of its own request body and sends nothing: the abort must not wait for it.
func TestAbortDoesNotWaitForTheRequestBody(t *testing.T) {
	n, url := start(t, func(w http.ResponseWriter, r *http.Request) {
		c := http.NewResponseController(w)
		c.EnableFullDuplex()
		io.WriteString(w, "half")
		c.Flush()
		io.Copy(io.Discard, r.Body) // until it is cut off
	})
	r := request(t, "POST", url, "8080")
	body, feed := io.Pipe()
	defer feed.Close()
	r.Body = body
	res := do(t, r)
	io.ReadFull(res.Body, make([]byte, 4))
	close(n.done)
	if _, err := io.ReadAll(res.Body); !errors.Is(err, io.ErrUnexpectedEOF) {
		t.Errorf("the stream ended with %v", err)
	}
}

func TestGuestThatDiesBeforeAnsweringIsA502NeverAReplay(t *testing.T) {
	var reached atomic.Int32
	n, url := start(t, func(http.ResponseWriter, *http.Request) { reached.Add(1); panic(http.ErrAbortHandler) })
	for _, method := range []string{"GET", "POST"} { // net/http would send a GET again on a reused connection
		res := do(t, request(t, method, url, "8080"))
		raw, _ := io.ReadAll(res.Body)
		if res.StatusCode != http.StatusBadGateway || !strings.Contains(string(raw), "may have been carried out") {
			t.Errorf("%s: %d %s", method, res.StatusCode, raw)
		}
	}
	if _, dials, _ := n.count(); reached.Load() != 2 || dials != 2 {
		t.Errorf("2 requests reached the guest %d times over %d connections", reached.Load(), dials)
	}
}

func TestClientThatLeavesCutsTheGuestsRequest(t *testing.T) {
	began, cut := make(chan struct{}), make(chan struct{})
	_, url := start(t, func(w http.ResponseWriter, r *http.Request) {
		http.NewResponseController(w).Flush()
		close(began)
		<-r.Context().Done()
		close(cut)
	})
	ctx, cancel := context.WithCancel(t.Context())
	do(t, request(t, "GET", url, "8080").WithContext(ctx))
	<-began
	cancel()
	<-cut
}

// A guest may refuse an upload without reading it. Its answer must win over the broken pipe of the upload.
func TestEarlyRefusalOfAnUploadReachesTheClient(t *testing.T) {
	_, url := start(t, func(w http.ResponseWriter, _ *http.Request) {
		http.Error(w, "too large", http.StatusRequestEntityTooLarge)
	})
	for range 20 {
		conn, err := net.Dial("tcp", strings.TrimPrefix(url, "http://"))
		if err != nil {
			t.Fatal(err)
		}
		sent := make(chan struct{})
		go func() { // a client that reads while it sends; net/http's own gives up at the broken pipe
			defer close(sent)
			io.WriteString(conn, "POST / HTTP/1.1\r\nHost: x\r\nTorpor-Sandbox: "+sandboxID+"\r\nTorpor-Port: 8080\r\nContent-Length: 33554432\r\n\r\n")
			io.CopyN(conn, zeros{}, 33554432)
		}()
		res, err := http.ReadResponse(bufio.NewReader(conn), nil)
		if err != nil {
			t.Fatal(err)
		}
		raw, _ := io.ReadAll(res.Body)
		if res.StatusCode != http.StatusRequestEntityTooLarge || string(raw) != "too large\n" {
			t.Fatalf("%d %s", res.StatusCode, raw)
		}
		conn.Close()
		<-sent
	}
}

type zeros struct{}

func (zeros) Read(p []byte) (int, error) { return len(p), nil }
