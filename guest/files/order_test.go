package files

import (
	"encoding/binary"
	"fmt"
	"net/url"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
)

// Watchers see a new file as exactly create, change of owner, write (e2b-wire C.6); an old one is given away before it is
// written.
func TestOrderOfEvents(t *testing.T) {
	h := newHarness(t, "")
	fd, err := unix.InotifyInit1(unix.IN_NONBLOCK | unix.IN_CLOEXEC)
	if err != nil {
		t.Skipf("no inotify here: %v", err)
	}
	defer func() { _ = unix.Close(fd) }()
	const watched = unix.IN_CREATE | unix.IN_ATTRIB | unix.IN_MODIFY | unix.IN_DELETE | unix.IN_MOVE
	if _, err := unix.InotifyAddWatch(fd, h.home, watched); err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{"create attrib modify", "attrib modify"} {
		resp, text := h.do("POST", url.Values{"path": {"f"}}, strings.NewReader("content"), "Content-Type", "application/octet-stream")
		if resp.StatusCode != 200 {
			t.Fatal(resp.Status, text)
		}
		if got := takeEvents(t, fd); got != want {
			t.Errorf("events %q, want %q", got, want)
		}
	}
}

// takeEvents reads the events that have happened; the kernel merges equal neighbours.
func takeEvents(t *testing.T, fd int) string {
	t.Helper()
	buf := make([]byte, 4096)
	n, err := unix.Read(fd, buf)
	if err != nil {
		t.Fatal(err)
	}
	names := map[uint32]string{unix.IN_CREATE: "create", unix.IN_ATTRIB: "attrib", unix.IN_MODIFY: "modify"}
	var events []string
	for at := 0; at < n; {
		mask, length := binary.NativeEndian.Uint32(buf[at+4:]), binary.NativeEndian.Uint32(buf[at+12:])
		name, ok := names[mask]
		if !ok {
			name = fmt.Sprintf("%#x", mask)
		}
		events = append(events, name)
		at += unix.SizeofInotifyEvent + int(length)
	}
	return strings.Join(events, " ")
}
