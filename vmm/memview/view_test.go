package memview

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

const page = 4096

// The test binary is also a process that has a view and waits to be killed.
func TestMain(m *testing.M) {
	if len(os.Args) == 2 && os.Args[1] == "have-a-view" {
		v, err := Take()
		if err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		fmt.Println(v.pid)
		_, _ = os.Stdin.Read(make([]byte, 1))
	}
	os.Exit(m.Run())
}

// mapped is memory outside the Go heap; fd is -1 for anonymous memory.
func mapped(t *testing.T, fd, size int) []byte {
	t.Helper()
	flags := unix.MAP_PRIVATE
	if fd < 0 {
		flags |= unix.MAP_ANONYMOUS
	}
	b, err := unix.Mmap(fd, 0, size, unix.PROT_READ|unix.PROT_WRITE, flags)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = unix.Munmap(b) })
	return b
}

func take(t *testing.T) *View {
	t.Helper()
	v, err := Take()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = v.Close() })
	return v
}

func read(t *testing.T, v *View, pieces ...Piece) (got []byte) {
	t.Helper()
	err := v.Read(pieces, func(b []byte) error { got = bytes.Clone(b); return nil })
	if err != nil {
		t.Fatal(err)
	}
	return got
}

// A view is what memory was, of every kind of page, whatever is written, given back or unmapped since.
func TestViewIsTheInstant(t *testing.T) {
	path := filepath.Join(t.TempDir(), "base")
	base := bytes.Repeat([]byte("base"), 64*page/4)
	if err := os.WriteFile(path, base, 0o600); err != nil {
		t.Fatal(err)
	}
	f, err := os.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	for name, fd := range map[string]int{"anonymous": -1, "private file": int(f.Fd())} {
		b := mapped(t, fd, 64*page)
		for i := 0; i < len(b); i += 3 * page {
			b[i] = byte(i/page) + 1
		}
		want := bytes.Clone(b)
		v := take(t)
		for i := range b {
			b[i] = 0xee
		}
		if err := unix.Madvise(b[8*page:16*page], unix.MADV_DONTNEED); err != nil {
			t.Fatal(err)
		}
		if got := read(t, v, Piece{address(b), len(b)}); !bytes.Equal(got, want) {
			t.Errorf("%s: the view changed", name)
		}
		got := read(t, v, Piece{address(b[9*page:]), page}, Piece{address(b[3*page:]), 7}, Piece{address(b), 0})
		if !bytes.Equal(got, append(bytes.Clone(want[9*page:10*page]), want[3*page:3*page+7]...)) {
			t.Errorf("%s: pieces differ", name)
		}
		if b[0] != 0xee {
			t.Errorf("%s: memory changed", name)
		}
	}
}

func TestViewIsReadByMany(t *testing.T) {
	b := mapped(t, -1, 256*page)
	for i := range 256 {
		b[i*page] = byte(i)
	}
	v := take(t)
	clear(b)
	var all sync.WaitGroup
	for first := range 16 {
		all.Go(func() {
			for i := first; i < 256; i += 16 {
				err := v.Read([]Piece{{address(b[i*page:]), page}}, func(p []byte) error {
					if p[0] != byte(i) || len(p) != page {
						return fmt.Errorf("page %d is %d", i, p[0])
					}
					return nil
				})
				if err != nil {
					t.Error(err)
				}
			}
		})
	}
	all.Wait()
}

func TestViewRefusesTooMuch(t *testing.T) {
	b := mapped(t, -1, MaxRead+page)
	v := take(t)
	none := func([]byte) error { return errors.New("it was called") }
	for name, pieces := range map[string][]Piece{
		"bytes":    {{address(b), MaxRead}, {address(b), 1}},
		"pieces":   make([]Piece, maxPieces+1),
		"negative": {{address(b), -1}},
	} {
		if err := v.Read(pieces, none); err == nil || errors.Is(err, ErrLost) {
			t.Errorf("%s: %v", name, err)
		}
	}
	if got := read(t, v, Piece{address(b), MaxRead}); len(got) != MaxRead {
		t.Errorf("%d bytes", len(got))
	}
	want := errors.New("the caller's")
	if err := v.Read(nil, func([]byte) error { return want }); !errors.Is(err, want) {
		t.Error(err)
	}
}

// A page that is gone ends the view, and nothing else: no handler of this process runs in the child.
func TestPageThatCannotBeRead(t *testing.T) {
	path := filepath.Join(t.TempDir(), "base")
	if err := os.WriteFile(path, make([]byte, 16*page), 0o600); err != nil {
		t.Fatal(err)
	}
	f, err := os.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	b := mapped(t, int(f.Fd()), 16*page)
	v := take(t)
	if err := os.Truncate(path, 0); err != nil {
		t.Fatal(err)
	}
	for range 2 {
		if err := v.Read([]Piece{{address(b), page}}, func([]byte) error { return nil }); !errors.Is(err, ErrLost) {
			t.Fatalf("read a page that is gone: %v", err)
		}
	}
	if err := v.Close(); err != nil {
		t.Error(err)
	}
}

// children are the processes whose parent this one is.
func children(t *testing.T) (pids []string) {
	t.Helper()
	tasks, err := filepath.Glob("/proc/self/task/*/children")
	if err != nil || len(tasks) == 0 {
		t.Skipf("this kernel does not list children: %v", err)
	}
	for _, path := range tasks {
		raw, err := os.ReadFile(path)
		if err != nil {
			continue // the thread has ended
		}
		pids = append(pids, strings.Fields(string(raw))...)
	}
	return pids
}

// The child keeps nothing of ours open but its pipes.
func TestChildHasNothing(t *testing.T) {
	before := len(children(t))
	v := take(t)
	read(t, v) // it has closed all it closes once it answers
	fds, err := os.ReadDir(fmt.Sprintf("/proc/%d/fd", v.pid))
	if err != nil {
		t.Fatal(err)
	}
	for _, fd := range fds {
		if to, _ := os.Readlink(fmt.Sprintf("/proc/%d/fd/%s", v.pid, fd.Name())); !strings.HasPrefix(to, "pipe:") {
			t.Errorf("it has %s", to)
		}
	}
	if len(fds) != 2 || len(children(t)) != before+1 {
		t.Errorf("%d descriptors, %d children", len(fds), len(children(t))-before)
	}
}

// However the process ends, its view goes with it.
func TestViewEndsWithItsProcess(t *testing.T) {
	cmd := exec.Command(os.Args[0], "have-a-view")
	cmd.Stderr = os.Stderr
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if _, err := cmd.StdinPipe(); err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	var pid int
	if _, err := fmt.Fscan(out, &pid); err != nil {
		t.Fatal(err)
	}
	fd, err := unix.PidfdOpen(pid, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(fd)
	ended := func(ms int) bool {
		n, err := unix.Poll([]unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}, ms)
		return n == 1 && err == nil
	}
	if ended(100) {
		t.Error("it did not last")
	}
	if err := cmd.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	if !ended(60_000) {
		t.Error("it outlives its process")
	}
	_ = cmd.Wait() // killed
}

func TestViewsLeaveNothing(t *testing.T) {
	count := func() int {
		fds, err := os.ReadDir("/proc/self/fd")
		if err != nil {
			t.Fatal(err)
		}
		return len(fds)
	}
	fds, kids := count(), len(children(t))
	for range 100 {
		v, err := Take()
		if err != nil {
			t.Fatal(err)
		}
		read(t, v)
		if err := v.Close(); err != nil {
			t.Fatal(err)
		}
	}
	if count() != fds || len(children(t)) != kids {
		t.Errorf("%d descriptors, %d children more", count()-fds, len(children(t))-kids)
	}
}

// BenchmarkTake takes views of a process with 1 GiB of memory in small pages.
func BenchmarkTake(b *testing.B) {
	mem, err := unix.Mmap(-1, 0, 1<<30, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS)
	if err != nil {
		b.Fatal(err)
	}
	defer unix.Munmap(mem)
	_ = unix.Madvise(mem, unix.MADV_NOHUGEPAGE)
	for i := 0; i < len(mem); i += page {
		mem[i] = 1
	}
	var reading time.Duration
	for b.Loop() {
		v, err := Take()
		if err != nil {
			b.Fatal(err)
		}
		b.StopTimer()
		begin := time.Now()
		for i := 0; i < len(mem); i += MaxRead {
			if err := v.Read([]Piece{{address(mem[i:]), MaxRead}}, func([]byte) error { return nil }); err != nil {
				b.Fatal(err)
			}
		}
		reading += time.Since(begin)
		if err := v.Close(); err != nil {
			b.Fatal(err)
		}
		b.StartTimer()
	}
	b.ReportMetric(float64(b.N)*1024/reading.Seconds(), "MiB-read/s")
}
