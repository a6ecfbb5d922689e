package e2e

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net/http"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"torpor/tools/rest"
)

// lifetime is the deadline tests give a sandbox that is not about deadlines.
const lifetime = time.Hour

var validID = regexp.MustCompile(`^[a-z0-9]+$`) // "-" and "." part host names

// newSandbox creates one that is killed at the test's end; when the test fails, its events and console are told.
func newSandbox(t *testing.T, req rest.NewSandbox) rest.Sandbox {
	t.Helper()
	if req.TemplateID == "" {
		req.TemplateID = "base"
	}
	if req.Timeout == 0 {
		req.Timeout = int(lifetime.Seconds())
	}
	sb, err := sys.Create(within(t, callLimit), req)
	if err != nil {
		t.Fatalf("create: %v", err)
	}
	if !validID.MatchString(sb.SandboxID) {
		t.Errorf("the id %q has characters that part host names", sb.SandboxID)
	}
	cleanUp(t, sb.SandboxID)
	return sb
}

// cleanUp makes sure that a sandbox is gone after the test, and tells its story if the test failed.
func cleanUp(t *testing.T, id string) {
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(t.Context()), limit(callLimit))
		defer cancel()
		if t.Failed() {
			tellStory(ctx, t, id)
		}
		if err := sys.Kill(ctx, id); err != nil && rest.StatusOf(err) != http.StatusNotFound {
			t.Errorf("killing %s: %v", id, err)
		}
	})
}

func tellStory(ctx context.Context, t *testing.T, id string) {
	events, err := sys.Events(ctx, id)
	for _, e := range events {
		t.Logf("%s #%d %s: %s -> %s %s", e.At.Format(time.StampMilli), e.Incarnation, e.Type, e.From, e.To, e.Reason)
	}
	var console bytes.Buffer
	if err := errors.Join(err, sys.Console(ctx, id, &console)); err != nil {
		t.Logf("(no more is known of %s: %v)", id, err)
	}
	t.Logf("console of %s:\n%s", id, console.Bytes()[max(0, console.Len()-2000):])
}

// within is a context for one step.
func within(t *testing.T, d time.Duration) context.Context {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), limit(d))
	t.Cleanup(cancel)
	return ctx
}

// eventually tries a look at something that announces itself nowhere, until it succeeds.
func eventually(t *testing.T, d time.Duration, what string, try func(context.Context) error) {
	t.Helper()
	ctx := within(t, d)
	tick := time.NewTicker(100 * time.Millisecond)
	defer tick.Stop()
	for {
		err := try(ctx)
		if err == nil {
			return
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			t.Fatalf("%s: %v", what, err)
		}
	}
}

func output(t *testing.T, sb rest.Sandbox, line string) string {
	t.Helper()
	out, err := sys.Output(within(t, commandLimit), sb, line)
	if err != nil {
		t.Fatalf("%s: %v", line, err)
	}
	return strings.TrimSpace(out)
}

func pause(t *testing.T, id string) {
	t.Helper()
	if err := sys.Pause(within(t, callLimit), id); err != nil {
		t.Fatalf("pause: %v", err)
	}
}

// wake connects and demands that the sandbox had been asleep.
func wake(t *testing.T, id string) rest.Sandbox {
	t.Helper()
	sb, resumed, err := sys.Connect(within(t, callLimit), id, lifetime)
	if err != nil {
		t.Fatalf("connect: %v", err)
	}
	if !resumed {
		t.Errorf("connect answered that %s was running", id)
	}
	return sb
}

func state(t *testing.T, id string) rest.State {
	t.Helper()
	s, err := sys.State(within(t, callLimit), id)
	if err != nil {
		t.Fatalf("state: %v", err)
	}
	return s
}

// keeperCode holds a nonce and a block of random memory, counts, and tells all of it to whoever connects. Nothing of it is ever
// in a file, an argument or an environment.
const keeperCode = `
import hashlib, os, secrets, socket, sys, threading, time
nonce, block, count = secrets.token_hex(16), bytearray(), 0
for _ in range(int(sys.argv[1])):
    block += os.urandom(1 << 20)  # in small pieces: what Python frees again stays dirty in the guest
def counting():
    global count
    while True:
        count += 1
        time.sleep(0.05)
threading.Thread(target=counting, daemon=True).start()
server = socket.create_server(("127.0.0.1", 7777))
while True:
    peer, _ = server.accept()
    peer.sendall(f"{nonce} {os.getpid()} {count} {hashlib.sha256(block).hexdigest()}\n".encode())
    peer.close()
`

// memory is what the keeper says.
type memory struct {
	nonce, pid, block string
	count             int
}

// keepMemory starts the keeper with a block of so many MiB.
func keepMemory(t *testing.T, sb rest.Sandbox, mib int) memory {
	t.Helper()
	const start = `setsid -f python3 -c "$1" "$2" </dev/null >/dev/null 2>&1
until (exec 3<>/dev/tcp/127.0.0.1/7777) 2>/dev/null; do sleep 0.1; done`
	var stderr bytes.Buffer
	code, err := sys.Exec(within(t, commandLimit), sb, rest.Command{
		Argv: []string{"bash", "-c", start, "keeper", keeperCode, strconv.Itoa(mib)}, Stderr: &stderr,
	})
	if err != nil || code != 0 {
		t.Fatalf("starting the keeper: code %d, %v: %s", code, err, &stderr)
	}
	return recall(t, sb)
}

func recall(t *testing.T, sb rest.Sandbox) memory {
	t.Helper()
	said := output(t, sb, "exec 3<>/dev/tcp/127.0.0.1/7777; cat <&3")
	f := strings.Fields(said)
	if len(f) != 4 {
		t.Fatalf("the keeper said %q", said)
	}
	count, err := strconv.Atoi(f[2])
	if err != nil {
		t.Fatalf("the keeper said %q", said)
	}
	return memory{nonce: f[0], pid: f[1], count: count, block: f[3]}
}

// sameMemory demands the same process with the same memory, still counting.
func sameMemory(t *testing.T, sb rest.Sandbox, before memory) {
	t.Helper()
	after := recall(t, sb)
	if after.nonce != before.nonce || after.pid != before.pid || after.block != before.block {
		t.Errorf("memory was not kept: %+v, before %+v", after, before)
	}
	if after.count < before.count {
		t.Errorf("the counter went back from %d to %d", before.count, after.count)
	}
	eventually(t, commandLimit, "the counter goes on", func(context.Context) error {
		if now := recall(t, sb); now.count <= after.count {
			return fmt.Errorf("it stays at %d", now.count)
		}
		return nil
	})
}

// transitions counts the events of the VM that lead to a state.
func transitions(events []rest.Event, to string) int {
	n := 0
	for _, e := range events {
		if e.Type == "vm" && e.To == to {
			n++
		}
	}
	return n
}

// afterLast cuts events to those after the last one that led the VM to a state.
func afterLast(events []rest.Event, to string) []rest.Event {
	for i, e := range slices.Backward(events) {
		if e.Type == "vm" && e.To == to {
			return events[i+1:]
		}
	}
	return nil
}

func eventsOf(t *testing.T, id string) []rest.Event {
	t.Helper()
	events, err := sys.Events(within(t, callLimit), id)
	if err != nil {
		t.Fatalf("events: %v", err)
	}
	return events
}
