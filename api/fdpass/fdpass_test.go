package fdpass

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"testing"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

const patience = 20 * time.Second

func newInbox(t testing.TB) (*Inbox, string) {
	t.Helper()
	path := filepath.Join(t.TempDir(), "files.sock")
	l, err := net.ListenUnix("unixpacket", &net.UnixAddr{Name: path, Net: "unixpacket"})
	if err != nil {
		t.Fatal(err)
	}
	b := NewInbox(l)
	t.Cleanup(func() { b.Close() })
	return b, path
}

func bounded(t testing.TB) context.Context {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	t.Cleanup(cancel)
	return ctx
}

func dial(t testing.TB, path string) *Sender {
	t.Helper()
	s, err := Dial(bounded(t), path)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { s.Close() })
	return s
}

func file(t testing.TB, text string) *os.File {
	t.Helper()
	f, err := os.Create(filepath.Join(t.TempDir(), "f"))
	if err == nil {
		_, err = f.WriteString(text)
	}
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { f.Close() })
	return f
}

// openFiles counts this process's descriptors.
func openFiles(t testing.TB) int {
	t.Helper()
	entries, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		t.Skipf("needs /proc: %v", err)
	}
	return len(entries)
}

// settled waits until as few descriptors are open as there were.
func settled(t testing.TB, was int) {
	t.Helper()
	for end := time.Now().Add(patience); openFiles(t) > was; runtime.Gosched() {
		if time.Now().After(end) {
			t.Fatalf("%d descriptors are open, were %d", openFiles(t), was)
		}
	}
}

func TestAFileGoesToWhoClaimsIt(t *testing.T) {
	b, path := newInbox(t)
	s := dial(t, path)
	sent := file(t, "contents")
	if err := s.Send(bounded(t), "disk", sent); err != nil {
		t.Fatal(err)
	}
	sent.Close()
	f, err := b.Claim("disk")
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if flags, err := unix.FcntlInt(f.Fd(), unix.F_GETFD, 0); err != nil || flags&unix.FD_CLOEXEC == 0 {
		t.Errorf("it would be inherited: flags %#x, %v", flags, err)
	}
	got := make([]byte, 8)
	if _, err := f.ReadAt(got, 0); err != nil || string(got) != "contents" || f.Name() != "disk" {
		t.Errorf("%q from %s, %v", got, f.Name(), err)
	}
	if _, err := b.Claim("disk"); !errors.Is(err, ErrNotHeld) {
		t.Errorf("claimed twice: %v", err)
	}
	if _, err := b.Claim("other"); !errors.Is(err, ErrNotHeld) {
		t.Errorf("claimed what nobody sent: %v", err)
	}
	if err := s.Send(bounded(t), "disk", file(t, "")); err != nil {
		t.Errorf("a claimed name is not free: %v", err)
	}
}

func TestUnclaimedFilesGoWithTheirConnection(t *testing.T) {
	b, path := newInbox(t)
	mine, other := file(t, ""), dial(t, path)
	if err := other.Send(bounded(t), "stays", mine); err != nil {
		t.Fatal(err)
	}
	was := openFiles(t)
	s := dial(t, path)
	for i := range 5 {
		if err := s.Send(bounded(t), fmt.Sprint(i), mine); err != nil {
			t.Fatal(err)
		}
	}
	claimed, err := b.Claim("0")
	if err != nil {
		t.Fatal(err)
	}
	s.Close()
	settled(t, was+1)
	if _, err := claimed.Stat(); err != nil {
		t.Errorf("a claimed file was closed: %v", err)
	}
	claimed.Close()
	if _, err := b.Claim("1"); !errors.Is(err, ErrNotHeld) {
		t.Errorf("an unclaimed file outlived its connection: %v", err)
	}
	kept, err := b.Claim("stays")
	if err != nil {
		t.Fatalf("another connection's file went too: %v", err)
	}
	kept.Close()
}

func TestRefusals(t *testing.T) {
	_, path := newInbox(t)
	s, f := dial(t, path), file(t, "")
	if err := s.Send(bounded(t), "a", f); err != nil {
		t.Fatal(err)
	}
	if err := dial(t, path).Send(bounded(t), "a", f); !errors.Is(err, ErrTaken) {
		t.Errorf("a name of another connection: %v", err)
	}
	for _, name := range []string{"", "a b", "a\n", "\x00", "ä", strings.Repeat("x", MaxName+1)} {
		if err := s.Send(bounded(t), name, f); !errors.Is(err, ErrName) {
			t.Errorf("%q: %v", name, err)
		}
	}
	was := openFiles(t)
	for i := 1; i < MaxHeld; i++ {
		if err := s.Send(bounded(t), strings.Repeat("x", i), f); err != nil {
			t.Fatal(err)
		}
	}
	if err := s.Send(bounded(t), "b", f); !errors.Is(err, ErrFull) {
		t.Errorf("one file too many: %v", err)
	}
	if n := openFiles(t); n != was+MaxHeld-1 {
		t.Errorf("%d descriptors are open, want %d", n, was+MaxHeld-1)
	}
}

// raw sends bytes and descriptors as a client that keeps to nothing does, and returns the answer; "" for the end.
func raw(t testing.TB, c *net.UnixConn, msg []byte, control []byte) string {
	t.Helper()
	if err := c.SetDeadline(time.Now().Add(patience)); err != nil {
		t.Fatal(err)
	}
	if err := send(c, msg, control); err != nil {
		t.Fatal(err)
	}
	answer := make([]byte, answerBytes)
	n, err := c.Read(answer)
	if err != nil && !errors.Is(err, io.EOF) && !errors.Is(err, unix.ECONNRESET) {
		t.Fatal(err)
	}
	return string(answer[:n])
}

// send is sendmsg(2) as it is: the one of package net adds a byte to an empty message.
func send(c *net.UnixConn, msg, control []byte) error {
	h := &unix.Msghdr{}
	iov := unix.Iovec{Base: unsafe.SliceData(msg)}
	iov.SetLen(len(msg))
	h.Iov = &iov
	h.SetIovlen(1)
	h.Control = unsafe.SliceData(control)
	h.SetControllen(len(control))
	conn, err := c.SyscallConn()
	if err != nil {
		return err
	}
	var errno unix.Errno
	err = conn.Control(func(fd uintptr) { _, _, errno = unix.Syscall(unix.SYS_SENDMSG, fd, uintptr(unsafe.Pointer(h)), 0) })
	if errno != 0 {
		return errno
	}
	return err
}

func rights(f *os.File, n int) []byte {
	if n == 0 {
		return nil
	}
	fds := make([]int, n)
	for i := range fds {
		fds[i] = int(f.Fd())
	}
	return unix.UnixRights(fds...)
}

func TestHostileMessagesLeakNothing(t *testing.T) {
	b, path := newInbox(t)
	f := file(t, "")
	if err := dial(t, path).Send(bounded(t), "taken", f); err != nil {
		t.Fatal(err)
	}
	was := openFiles(t)
	long := bytes.Repeat([]byte("n"), 1000)
	for _, c := range []struct {
		name    string
		msg     []byte
		control []byte
		want    string
	}{
		{"no file", []byte("a"), nil, "count"},
		{"two files", []byte("a"), rights(f, 2), "count"},
		{"three files, for which there is no room", []byte("a"), rights(f, 3), "count"},
		{"the most files the kernel takes", []byte("a"), rights(f, 253), "count"},
		{"two messages of files", []byte("a"), append(rights(f, 1), rights(f, 1)...), "count"},
		{"a long name", long, rights(f, 1), "name"},
		{"a long name, no file", long, nil, "count"},
		{"a bad name", []byte("a\x00b"), rights(f, 1), "name"},
		{"a name that is taken", []byte("taken"), rights(f, 1), "taken"},
		{"credentials", []byte("a"), unix.UnixCredentials(&unix.Ucred{Pid: int32(os.Getpid())}), "count"},
		{"nothing said", nil, rights(f, 1), ""},
		{"nothing said, several files", nil, rights(f, 9), ""},
	} {
		t.Run(c.name, func(t *testing.T) {
			s := dial(t, path)
			if got := raw(t, s.conn, c.msg, c.control); got != c.want {
				t.Errorf("answered %q, want %q", got, c.want)
			}
			if c.want != "" {
				settled(t, was+2) // both ends of the connection
			}
			s.Close()
			settled(t, was)
		})
	}
	if _, err := b.Claim("a"); !errors.Is(err, ErrNotHeld) {
		t.Errorf("something was held: %v", err)
	}
}

func TestConnectionsAreBounded(t *testing.T) {
	_, path := newInbox(t)
	f := file(t, "")
	var first *Sender
	for i := range maxConns {
		s := dial(t, path)
		if err := s.Send(bounded(t), fmt.Sprint(i), f); err != nil {
			t.Fatal(err)
		}
		if first == nil {
			first = s
		}
	}
	if err := dial(t, path).Send(bounded(t), "more", f); err == nil {
		t.Error("one connection too many is served")
	}
	first.Close()
	for {
		err := dial(t, path).Send(bounded(t), "more", f)
		if err == nil {
			return
		}
		if bounded(t).Err() != nil {
			t.Fatalf("the place of an ended connection is not free: %v", err)
		}
	}
}

func TestCloseClosesAll(t *testing.T) {
	was := openFiles(t)
	path := filepath.Join(t.TempDir(), "files.sock")
	l, err := net.ListenUnix("unixpacket", &net.UnixAddr{Name: path, Net: "unixpacket"})
	if err != nil {
		t.Fatal(err)
	}
	b := NewInbox(l)
	s, f := dial(t, path), file(t, "")
	if err := s.Send(bounded(t), "a", f); err != nil {
		t.Fatal(err)
	}
	if err := b.Close(); err != nil {
		t.Fatal(err)
	}
	if err := s.Send(bounded(t), "b", f); err == nil {
		t.Error("a closed inbox takes files")
	}
	s.Close()
	f.Close()
	if n := openFiles(t); n > was+1 { // the runtime's poller may have come
		t.Errorf("%d descriptors are open, were %d", n, was)
	}
}

func TestSendEndsWithItsContext(t *testing.T) {
	path := filepath.Join(t.TempDir(), "silent.sock")
	l, err := net.ListenUnix("unixpacket", &net.UnixAddr{Name: path, Net: "unixpacket"})
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	ctx, cancel := context.WithCancel(context.Background())
	s := dial(t, path)
	time.AfterFunc(10*time.Millisecond, cancel)
	if err := s.Send(ctx, "a", file(t, "")); !errors.Is(err, context.Canceled) {
		t.Errorf("got %v", err)
	}
}

func FuzzInbox(f *testing.F) {
	f.Add([]byte("disk"), uint8(1))
	f.Add([]byte(""), uint8(1))
	f.Add([]byte("a"), uint8(0))
	f.Add([]byte("a"), uint8(3))
	f.Add(bytes.Repeat([]byte("x"), MaxName), uint8(1))
	f.Add(bytes.Repeat([]byte("x"), MaxName+1), uint8(1))
	f.Add([]byte("\xff\x00"), uint8(200))
	b, path := newInbox(f)
	sent := file(f, "")
	f.Fuzz(func(t *testing.T, name []byte, files uint8) {
		if len(name) > 1<<16 || files > 253 { // more the kernel does not take (SCM_MAX_FD)
			return
		}
		was := openFiles(t)
		s, err := Dial(bounded(t), path)
		if err != nil {
			t.Fatal(err)
		}
		answer := raw(t, s.conn, name, rights(sent, int(files)))
		if ok := files == 1 && validName(string(name)); ok != (answer == accepted) {
			t.Errorf("%q with %d files: answered %q", name, files, answer)
		}
		s.Close()
		settled(t, was)
		if _, err := b.Claim(string(name)); err == nil {
			t.Error("it is still held")
		}
	})
}

func FuzzParseAnswer(f *testing.F) {
	f.Add("ok")
	f.Add("name")
	f.Add("")
	f.Fuzz(func(t *testing.T, word string) {
		if parseAnswer(word) == nil && word != accepted {
			t.Errorf("%q is taken for a yes", word)
		}
	})
}
