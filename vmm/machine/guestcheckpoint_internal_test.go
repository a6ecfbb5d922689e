package machine

import (
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"

	"torpor/vmm/cow"
)

// checkpointGuest takes a checkpoint of g, which goes on with a new top of its disk. fork is what a restore needs to know of the
// guest that was saved.
func checkpointGuest(t *testing.T, i image, g *guest, base string) (files savedFiles, fork *guest) {
	t.Helper()
	top := filepath.Join(t.TempDir(), "top.layer")
	if err := cow.Create(top, i.DiskBytes); err != nil {
		t.Fatal(err)
	}
	saved := *g
	saved.layers = slices.Clone(g.layers)
	files, got, stopped := checkpoint(t, g.Machine, base, openFile(t, top, os.O_RDWR))
	g.layers = append(g.layers, top)
	t.Logf("stood still for %v, saved %d pages", stopped, got.DataPages)
	return files, &saved
}

// counting prints numbers until a file is there.
const counting = "i=0; while [ ! -e /dev/shm/stop ]; do i=$((i+1)); echo $i; sleep 0.02; done"

// A checkpoint of a guest that streams: the stream is not cut and misses nothing, its machine goes on, and what was saved is a
// machine of its own, with the memory and the disk of that instant.
func TestRealGuestCheckpoint(t *testing.T) {
	i := needImage(t)
	boot := bootGuest(t, i, 2)
	full, _ := save(t, boot.Machine, "")
	g := restoreGuest(t, i, boot, full)
	g.health(t)

	type result struct {
		out  string
		exit int32
		err  error
	}
	stream := make(chan result, 1)
	go func() {
		out, exit, err := g.runWithin(t, 5*guestTimeout, counting)
		stream <- result{out, exit, err}
	}()
	for round := range 2 {
		now := strconv.Itoa(round)
		nonce := g.sh(t, "head -c 16 /dev/urandom | od -An -tx1 | tee /dev/shm/nonce; echo before "+now+" > /root/where; sync")
		from, fork := checkpointGuest(t, i, g, full.base)
		verify(t, from)
		g.sh(t, "echo parent > /root/where; rm /dev/shm/nonce; sync")

		child := restoreGuest(t, i, fork, from)
		child.health(t)
		if got := child.sh(t, "cat /dev/shm/nonce"); got != nonce {
			t.Errorf("round %d: the child has the nonce %q, want %q", round, got, nonce)
		}
		if got := child.sh(t, "cat /root/where"); got != "before "+now {
			t.Errorf("round %d: the child's disk says %q", round, got)
		}
		child.sh(t, "echo child > /root/where; sync; dmesg | grep -ciE 'I/O error|EXT4-fs error' | grep -qx 0")
		if got := g.sh(t, "cat /root/where; test ! -e /dev/shm/nonce"); got != "parent" {
			t.Errorf("round %d: the parent's disk says %q", round, got)
		}
		child.clean(t)
		if err := child.Pause(); err != nil { // its CPUs are the others' now
			t.Fatal(err)
		}
		select {
		case r := <-stream:
			t.Fatalf("the stream ended: %d, %v", r.exit, r.err)
		default:
		}
	}
	g.sh(t, "touch /dev/shm/stop")
	r := <-stream
	if r.err != nil || r.exit != 0 {
		t.Fatalf("the stream: %d, %v", r.exit, r.err)
	}
	lines := strings.Fields(r.out)
	for n, line := range lines {
		if line != strconv.Itoa(n+1) {
			t.Fatalf("line %d of the stream is %q", n+1, line)
		}
	}
	t.Logf("%d lines", len(lines))
	g.clean(t)
}
