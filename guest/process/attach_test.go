package process

import (
	"fmt"
	"net/http"
	"strings"
	"sync"
	"testing"
	"time"

	"connectrpc.com/connect"
	"google.golang.org/protobuf/proto"

	"torpor/api/envd"
	"torpor/guest/env"
)

func (h *harness) attach(sel *envd.ProcessSelector) (*connect.ServerStreamForClient[envd.ConnectResponse], *run) {
	h.t.Helper()
	stream, err := h.client.Connect(h.context(), connect.NewRequest(&envd.ConnectRequest{Process: sel}))
	if err != nil {
		h.t.Fatal(err)
	}
	r := &run{}
	if !stream.Receive() {
		h.t.Fatal(stream.Err())
	}
	if r.add(stream.Msg().GetEvent()); r.pid == 0 {
		h.t.Fatalf("first event is %v, not start", stream.Msg())
	}
	return stream, r
}

// All subscribers get all that is written after they came.
func TestSubscribers(t *testing.T) {
	const readers, size = 5, 2 << 20
	h := newHarness(t, env.Identity{})
	req := &envd.StartRequest{
		Process: &envd.ProcessConfig{Cmd: "/bin/sh", Args: []string{"-c", fmt.Sprintf("read go; head -c %d /dev/zero", size)}},
		Tag:     proto.String("job"),
	}
	first, r := h.start(h.context(), connect.NewRequest(req))
	byTag := &envd.ProcessSelector{Selector: &envd.ProcessSelector_Tag{Tag: "job"}}
	var all sync.WaitGroup
	counts := make([]int, readers)
	for i := range readers {
		stream, _ := h.attach(byTag)
		all.Go(func() {
			for stream.Receive() {
				counts[i] += len(stream.Msg().GetEvent().GetData().GetStdout())
			}
		})
	}
	_, err := h.client.SendInput(h.context(), connect.NewRequest(&envd.SendInputRequest{
		Process: byTag, Input: &envd.ProcessInput{Input: &envd.ProcessInput_Stdin{Stdin: []byte("\n")}},
	}))
	if err != nil {
		t.Fatal(err)
	}
	h.finish(first, r)
	all.Wait()
	for i, n := range append(counts, len(r.stdout)) {
		if n != size {
			t.Errorf("reader %d got %d bytes of %d", i, n, size)
		}
	}
}

// A reader that takes nothing holds up the others for a while only; one that is alone holds up the process, not memory.
func TestStalledReader(t *testing.T) {
	h := &hub{stall: 20 * time.Millisecond}
	stalled := h.subscribe()
	live := h.subscribe()
	const n = 4 * queueLen
	got := make(chan int)
	go func() {
		count := 0
		for ev := range live.events {
			if ev.GetEnd() != nil {
				break
			}
			count++
		}
		got <- count
	}()
	for range n {
		h.publish(&envd.ProcessEvent{})
	}
	h.finish(&envd.ProcessEvent{Event: &envd.ProcessEvent_End{End: &envd.ProcessEvent_EndEvent{}}})
	if count := <-got; count != n {
		t.Errorf("the live reader got %d events of %d", count, n)
	}
	select {
	case <-stalled.cut:
	default:
		t.Error("the stalled reader was not cut off")
	}
}

func TestLeavingReaderFreesPublisher(t *testing.T) {
	h := &hub{stall: time.Hour}
	sub := h.subscribe()
	published := make(chan struct{})
	go func() {
		defer close(published)
		for range 3 * queueLen {
			h.publish(&envd.ProcessEvent{})
		}
	}()
	for len(sub.events) < queueLen {
		time.Sleep(time.Millisecond)
	}
	sub.leave()
	sub.leave() // harmless
	select {
	case <-published:
	case <-time.After(patience):
		t.Fatal("publishing waits for a reader that left")
	}
}

func TestKeepalive(t *testing.T) {
	h := newHarness(t, env.Identity{})
	req := connect.NewRequest(sh("sleep 2.5"))
	req.Header().Set("Keepalive-Ping-Interval", "1")
	stream, r := h.start(h.context(), req)
	if h.finish(stream, r); r.keepalives == 0 || r.err != nil {
		t.Errorf("%d keepalives, %v", r.keepalives, r.err)
	}
}

func TestInterval(t *testing.T) {
	for value, want := range map[string]time.Duration{
		"": keepaliveDefault, "50": 50 * time.Second, "0": keepaliveDefault, "-1": keepaliveDefault, "x": keepaliveDefault,
		"1.5": keepaliveDefault, "3600": time.Hour, "3601": keepaliveDefault, "9223372036854775807": keepaliveDefault,
	} {
		if got := interval(http.Header{"Keepalive-Ping-Interval": {value}}); got != want {
			t.Errorf("%q: %v", value, got)
		}
	}
}

func TestTerminal(t *testing.T) {
	h := newHarness(t, env.Identity{})
	ctx := h.context()
	size := func(cols, rows uint32) *envd.PTY { return &envd.PTY{Size: &envd.PTY_Size{Cols: cols, Rows: rows}} }
	stream, r := h.start(ctx, connect.NewRequest(&envd.StartRequest{
		Process: &envd.ProcessConfig{Cmd: "/bin/sh", Args: []string{"-c", "tty; stty size; read x; stty size; exit 5"}},
		Pty:     size(80, 24),
	}))
	for strings.Count(r.pty, "\n") < 2 && stream.Receive() {
		r.add(stream.Msg().GetEvent())
	}
	if _, err := h.client.Update(ctx, connect.NewRequest(&envd.UpdateRequest{Process: byPid(r.pid), Pty: size(100, 30)})); err != nil {
		t.Fatal(err)
	}
	if _, err := h.client.Update(ctx, connect.NewRequest(&envd.UpdateRequest{Process: byPid(r.pid)})); err != nil {
		t.Errorf("an update without a size: %v", err)
	}
	_, err := h.client.CloseStdin(ctx, connect.NewRequest(&envd.CloseStdinRequest{Process: byPid(r.pid)}))
	if connect.CodeOf(err) != connect.CodeUnknown {
		t.Errorf("closing the stdin of a terminal: %v", err)
	}
	send := func(in *envd.ProcessInput) error {
		_, err := h.client.SendInput(ctx, connect.NewRequest(&envd.SendInputRequest{Process: byPid(r.pid), Input: in}))
		return err
	}
	if err := send(&envd.ProcessInput{Input: &envd.ProcessInput_Stdin{Stdin: []byte("x")}}); connect.CodeOf(err) != connect.CodeInternal {
		t.Errorf("stdin for a terminal: %v", err)
	}
	if err := send(&envd.ProcessInput{Input: &envd.ProcessInput_Pty{Pty: []byte("\n")}}); err != nil {
		t.Fatal(err)
	}
	h.finish(stream, r)
	if !strings.Contains(r.pty, "/dev/pts/") || !strings.Contains(r.pty, "24 80") || !strings.Contains(r.pty, "30 100") {
		t.Errorf("terminal said %q", r.pty)
	}
	if r.end.GetExitCode() != 5 || r.err != nil {
		t.Errorf("end %v, %v", r.end, r.err)
	}
}
