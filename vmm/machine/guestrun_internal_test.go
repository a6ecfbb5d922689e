package machine

import (
	"context"
	"encoding/base64"
	"errors"
	"net"
	"net/http"
	"strings"
	"testing"
	"time"

	"connectrpc.com/connect"

	"torpor/api/envd"
	"torpor/api/envd/envdconnect"
)

// run executes a shell script as the guest's root and returns its output. The error is about the way there and back.
func (g *guest) run(t *testing.T, script string) (out string, exit int32, err error) {
	t.Helper()
	return g.runWithin(t, guestTimeout, script)
}

// runWithin is run for a script that may take so long.
func (g *guest) runWithin(t *testing.T, limit time.Duration, script string) (out string, exit int32, err error) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), limit)
	defer cancel()
	client := &http.Client{Transport: &http.Transport{
		DisableKeepAlives: true,
		DialContext:       func(ctx context.Context, _, _ string) (net.Conn, error) { return g.dial(ctx, healthPort) },
	}}
	noStdin := false
	req := connect.NewRequest(&envd.StartRequest{
		Process: &envd.ProcessConfig{Cmd: "/bin/sh", Args: []string{"-c", script}}, Stdin: &noStdin,
	})
	req.Header().Set("Authorization", "Basic "+base64.StdEncoding.EncodeToString([]byte("root:")))
	stream, err := envdconnect.NewProcessClient(client, "http://guest", connect.WithProtoJSON()).Start(ctx, req)
	if err != nil {
		return "", 0, err
	}
	defer func() { _ = stream.Close() }()
	for stream.Receive() {
		event := stream.Msg().GetEvent()
		out += string(event.GetData().GetStdout()) + string(event.GetData().GetStderr())
		if end := event.GetEnd(); end != nil {
			return out, end.GetExitCode(), nil
		}
	}
	return out, 0, errors.Join(stream.Err(), errors.New("the guest did not tell how it ended"))
}

// sh is run for a script that must work.
func (g *guest) sh(t *testing.T, script string) string {
	t.Helper()
	start := time.Now()
	out, exit, err := g.run(t, script)
	if err != nil || exit != 0 {
		t.Fatalf("%s: exit code %d, %v\n%s", script, exit, err, out)
	}
	t.Logf("%.60s: took %v", script, time.Since(start).Round(time.Millisecond))
	return strings.TrimSpace(out)
}

// within waits for something the guest does.
func (g *guest) within(t *testing.T, what string, f func() bool) {
	t.Helper()
	start := time.Now()
	for !f() {
		if time.Since(start) > guestTimeout {
			t.Fatalf("%s: not after %v; %+v", what, guestTimeout, g.Status())
		}
		select {
		case <-g.Done():
			t.Fatalf("%s: the guest ended: %s", what, g.End().Detail)
		case <-time.After(50 * time.Millisecond): // what is waited for has no event
		}
	}
	t.Logf("%s: took %v", what, time.Since(start).Round(time.Millisecond))
}

// The ways in which a real kernel ends, each told apart, each from one snapshot.
func TestRealGuestEnds(t *testing.T) {
	i := needImage(t)
	g := bootGuest(t, i, 1)
	full, _ := save(t, g.Machine, "")
	for _, c := range []struct {
		name, script string
		reason       Reason
		console      string
		flag         uint16
	}{
		{"panic", "echo c > /proc/sysrq-trigger", ReasonPanic, "Kernel panic - not syncing: sysrq triggered crash", warmBoot},
		{"reboot at once", "echo b > /proc/sysrq-trigger", ReasonReset, "", 0},
		{"reboot", "sync; python3 -c 'import ctypes; ctypes.CDLL(None).reboot(0x1234567)'", ReasonReset, "", 0},
		{"power-off", "sync; python3 -c 'import ctypes; ctypes.CDLL(None).reboot(0x4321fedc)'", ReasonPowerOff, "", 0},
	} {
		t.Run(c.name, func(t *testing.T) {
			r := restoreGuest(t, i, g, full)
			if _, exit, err := r.run(t, c.script); err == nil {
				t.Logf("the script came back with %d", exit)
			} else if connect.CodeOf(err) == connect.CodeDeadlineExceeded {
				t.Error("who talks to a guest that has ended waits for ever")
			}
			select {
			case <-r.Done():
			case <-time.After(guestTimeout):
				t.Fatal("the guest did not end")
			}
			end := r.End()
			t.Logf("%s: %s", end.Reason, end.Detail)
			if end.Reason != c.reason || !strings.Contains(end.Detail, c.console) || !strings.Contains(string(end.ConsoleTail), c.console) {
				t.Errorf("ended by %s: %s\n%s", end.Reason, end.Detail, end.ConsoleTail)
			}
			if flag, err := r.ram.mem.ReadUint16(bootFlag); err != nil || flag != c.flag {
				t.Errorf("boot flag %#x, %v; want %#x", flag, err, c.flag)
			}
		})
	}
}

// A pause, with a snapshot or without, is no time for the guest: its monotonic clock goes on where it was, timers fire, and
// its kernel has nothing to complain of.
func TestRealGuestTimeStandsStillInAPause(t *testing.T) {
	i := needImage(t)
	g := bootGuest(t, i, 2)
	const nap = 4 * time.Second // long against nothing: it is compared with what passes in the guest
	monotonic := func(g *guest) time.Duration {
		s, err := time.ParseDuration(g.sh(t, "python3 -c 'import time; time.sleep(0.05); print(time.monotonic())'") + "s")
		if err != nil {
			t.Fatal(err)
		}
		return s
	}
	begin, before := time.Now(), monotonic(g)
	if err := g.Pause(); err != nil {
		t.Fatal(err)
	}
	time.Sleep(nap)
	if err := g.Resume(); err != nil {
		t.Fatal(err)
	}
	check := func(what string, before, after time.Duration) {
		t.Helper()
		passed, outside := after-before, time.Since(begin)
		t.Logf("%s: %v passed inside, %v outside", what, passed, outside)
		if passed <= 0 || passed > outside-nap/2 {
			t.Errorf("%s: %v passed in the guest while it lived for at most %v", what, passed, outside-nap)
		}
	}
	after := monotonic(g)
	check("pause", before, after)

	begin, before = time.Now(), monotonic(g)
	full, _ := save(t, g.Machine, "")
	time.Sleep(nap)
	r := restoreGuest(t, i, g, full)
	check("snapshot", before, monotonic(r))
	r.sh(t, "for i in 1 2 3 4 5 6 7 8 9 10; do sleep 0.1; done")
	g.clean(t)
	r.clean(t)
}

// stats asks for fresh statistics.
func (g *guest) stats(t *testing.T) map[string]uint64 {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), guestTimeout)
	defer cancel()
	s, err := g.BalloonStats(ctx)
	if err != nil {
		t.Fatal(err)
	}
	if total, free := s.Stats["total_memory"], s.Stats["free_memory"]; total == 0 || free > total || total > 512*mib {
		t.Errorf("statistics %v", s.Stats)
	}
	return s.Stats
}

// settled waits until the guest has reported all that it has free, and returns the status then. It reports every two seconds.
func (g *guest) settled(t *testing.T) Status {
	t.Helper()
	last, since := g.Status(), time.Now()
	g.within(t, "reporting what is free", func() bool {
		if now := g.Status(); now.Balloon.Discarded != last.Balloon.Discarded {
			last, since = now, time.Now()
		}
		return time.Since(since) > 8*time.Second
	})
	return last
}

func (g *guest) balloon(t *testing.T, target uint64) {
	t.Helper()
	before := g.Status().Balloon.Discarded
	if err := g.SetBalloon(target); err != nil {
		t.Fatal(err)
	}
	was := g.Status().Balloon.Actual
	g.within(t, "ballooning", func() bool { return g.Status().Balloon.Actual == target })
	if got := g.Status().Balloon.Discarded - before; target > was && got < target-was {
		t.Errorf("the balloon grew by %d bytes, %d were given back", target-was, got)
	}
}

// useMemory fills memory in the guest, reads it back, and frees it.
const useMemory = `python3 -c '
import hashlib, os
block = os.urandom(1 << 20)
want = hashlib.sha1(block).digest()
blocks = [bytearray(block) for _ in range(%d)]
assert all(hashlib.sha1(b).digest() == want for b in blocks)'`

func memoryUse(mibytes string) string { return strings.Replace(useMemory, "%d", mibytes, 1) }

// Memory that the guest frees reaches the host and no snapshot; a balloon survives generations; statistics never stall; and
// what a guest keeps is never lost.
func TestRealGuestGivesMemoryBack(t *testing.T) {
	i := needImage(t)
	g := bootGuest(t, i, 1)
	g.stats(t)
	full, _ := save(t, g.Machine, "")
	last := restoreGuest(t, i, g, full)
	last.health(t)

	// Free page reporting, and what a diff costs after it.
	last.sh(t, "python3 -c pass") // what Python itself touches
	before := last.settled(t)
	last.sh(t, memoryUse("100"))
	used := last.Status()
	after := last.settled(t)
	t.Logf("resident before %d MiB, in between %d MiB, after %d MiB", before.ResidentBytes>>20, used.ResidentBytes>>20, after.ResidentBytes>>20)
	if got := after.Balloon.Discarded - before.Balloon.Discarded; got < 80*mib {
		t.Errorf("%d bytes were given back after 100 MiB were freed", got)
	}
	diff, saved := save(t, last.Machine, full.base)
	t.Logf("diff: %+v", saved)
	if saved.DataPages*4096 > 60*mib {
		t.Errorf("a diff of %d pages after 100 MiB were used and freed", saved.DataPages)
	}

	// Stored by one generation, freed in the next: then it is stored no more.
	last = restoreGuest(t, i, last, diff)
	last.sh(t, "dd if=/dev/urandom of=/dev/shm/big bs=1M count=64 2>/dev/null")
	diff, saved = save(t, last.Machine, full.base)
	t.Logf("diff with 64 MiB: %+v", saved)
	last = restoreGuest(t, i, last, diff)
	last.sh(t, "rm /dev/shm/big")
	last.settled(t)
	diff, again := save(t, last.Machine, full.base)
	t.Logf("diff without: %+v", again)
	if again.DataPages*4096+40*mib > saved.DataPages*4096 {
		t.Errorf("%d pages are stored after 64 MiB were freed, %d before", again.DataPages, saved.DataPages)
	}

	// Ballooned in one generation, given back in a later one, with work in between.
	const half = 256 * mib
	const (
		sums = "cat /dev/shm/kept /root/kept | sha1sum"
		kept = "dd if=/dev/urandom of=/dev/shm/kept bs=1M count=8 2>/dev/null; cp /dev/shm/kept /root/kept; " + sums
	)
	want := ""
	for cycle := range rounds(5) {
		next := restoreGuest(t, i, last, diff)
		last.clean(t)
		last = next
		if cycle == 0 {
			want = last.sh(t, kept)
			last.balloon(t, half)
		}
		if b := last.Status().Balloon; b.Target != half || b.Actual != half {
			t.Errorf("cycle %d: balloon %+v", cycle, b)
		}
		if free := last.stats(t)["free_memory"]; free > half {
			t.Errorf("cycle %d: %d bytes are free beside a balloon of %d", cycle, free, half)
		}
		last.sh(t, memoryUse("60"))
		if got := last.sh(t, sums); got != want {
			t.Errorf("cycle %d: a file kept in memory or on the disk is another", cycle)
		}
		if err := last.Pause(); err != nil {
			t.Fatal(err)
		}
		diff, saved = save(t, last.Machine, full.base)
		t.Logf("cycle %d: %+v", cycle, saved)
		verify(t, diff)
	}
	next := restoreGuest(t, i, last, diff)
	last.clean(t)
	next.balloon(t, 0)
	next.sh(t, memoryUse("300")) // touches what was in the balloon
	if got := next.sh(t, sums); got != want {
		t.Error("a file kept in memory or on the disk is another")
	}
	// A balloon of nearly all that the guest can spare gives way to who needs memory.
	next.balloon(t, 320*mib)
	next.sh(t, memoryUse("80"))
	next.health(t)
	next.stats(t)
	next.clean(t)
}
