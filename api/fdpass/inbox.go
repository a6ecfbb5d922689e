package fdpass

import (
	"errors"
	"fmt"
	"net"
	"os"
	"sync"
	"time"

	"golang.org/x/sys/unix"
)

const (
	// maxConns is how many connections are served at a time; more are closed at once.
	maxConns = 16
	// acceptPause is how long the listener rests when the process has no descriptor to spare.
	acceptPause = 100 * time.Millisecond
)

// ErrNotHeld is wrapped by the error about a name under which nothing is held.
var ErrNotHeld = errors.New("no file of this name has been handed over")

// Inbox receives files and holds them until they are claimed. It is safe for concurrent use.
type Inbox struct {
	listener *net.UnixListener
	done     chan struct{} // closed by Close
	work     sync.WaitGroup

	// mu guards all below.
	mu     sync.Mutex
	closed bool
	conns  map[*net.UnixConn]struct{}
	held   map[string]heldFile
}

type heldFile struct {
	*os.File
	from *net.UnixConn
}

// NewInbox serves a listener of type SOCK_SEQPACKET, which becomes the inbox's, until Close.
func NewInbox(l *net.UnixListener) *Inbox {
	b := &Inbox{listener: l, done: make(chan struct{}), conns: map[*net.UnixConn]struct{}{}, held: map[string]heldFile{}}
	b.work.Go(b.accept)
	return b
}

// Claim returns the file held under a name; it is the caller's from then on. ErrNotHeld (wrapped) says that there is none.
func (b *Inbox) Claim(name string) (*os.File, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	f, ok := b.held[name]
	if !ok {
		return nil, fmt.Errorf("%w: %.80q", ErrNotHeld, name)
	}
	delete(b.held, name)
	return f.File, nil
}

// Close ends all connections and closes what is still held.
func (b *Inbox) Close() error {
	b.mu.Lock()
	if !b.closed {
		b.closed = true
		close(b.done)
	}
	err := b.listener.Close()
	for c := range b.conns {
		_ = c.Close() // its goroutine sees it
	}
	b.mu.Unlock()
	b.work.Wait()
	return err
}

func (b *Inbox) accept() {
	for {
		conn, err := b.listener.AcceptUnix()
		if errors.Is(err, net.ErrClosed) {
			return
		}
		if err != nil {
			select {
			case <-time.After(acceptPause):
			case <-b.done:
			}
			continue
		}
		if !b.enter(conn) {
			_ = conn.Close() // nothing was said on it
			continue
		}
		b.work.Go(func() { b.serve(conn) })
	}
}

func (b *Inbox) enter(conn *net.UnixConn) bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.closed || len(b.conns) >= maxConns {
		return false
	}
	b.conns[conn] = struct{}{}
	return true
}

// leave ends a connection and closes what it brought and nobody claimed.
func (b *Inbox) leave(conn *net.UnixConn) {
	b.mu.Lock()
	defer b.mu.Unlock()
	delete(b.conns, conn)
	for name, f := range b.held {
		if f.from == conn {
			_ = f.Close() // nothing was written through it
			delete(b.held, name)
		}
	}
	_ = conn.Close()
}

func (b *Inbox) serve(conn *net.UnixConn) {
	defer b.leave(conn)
	for {
		name, files, err := receive(conn)
		if err != nil {
			return
		}
		if _, err := conn.Write([]byte(b.take(conn, name, files))); err != nil {
			return
		}
	}
}

// receive takes one message. The files are the caller's; there are none with an error. A name of more than MaxName bytes comes
// as one that is too long.
func receive(conn *net.UnixConn) (name string, files []int, err error) {
	msg := make([]byte, MaxName+1)
	// Room for one descriptor, which by alignment is room for two: that there were more is seen, and the kernel drops those
	// for which there is no room.
	control := make([]byte, unix.CmsgSpace(4))
	n, controlled, flags, _, err := conn.ReadMsgUnix(msg, control)
	files = descriptors(control[:controlled])
	if err != nil { // an empty message reads as the end, whatever came with it
		closeAll(files)
		return "", nil, err
	}
	if flags&unix.MSG_CTRUNC != 0 {
		closeAll(files)
		files = nil // there were more than those that came
	}
	return string(msg[:n]), files, nil
}

// descriptors are all that came in a control message, which is the kernel's and well-formed.
func descriptors(control []byte) (files []int) {
	msgs, err := unix.ParseSocketControlMessage(control)
	if err != nil {
		return nil
	}
	for i := range msgs {
		if fds, err := unix.ParseUnixRights(&msgs[i]); err == nil {
			files = append(files, fds...)
		}
	}
	return files
}

func closeAll(files []int) {
	for _, fd := range files {
		_ = unix.Close(fd) // nothing was written through it
	}
}

// take holds a file or closes it, and returns the answer.
func (b *Inbox) take(conn *net.UnixConn, name string, files []int) string {
	if err := b.hold(conn, name, files); err != nil {
		closeAll(files)
		return refusals[err]
	}
	return accepted
}

// hold returns one of the errors in refusals, as it is.
func (b *Inbox) hold(conn *net.UnixConn, name string, files []int) error {
	b.mu.Lock()
	defer b.mu.Unlock()
	switch _, taken := b.held[name]; {
	case len(files) != 1:
		return ErrCount
	case !validName(name):
		return ErrName
	case taken:
		return ErrTaken
	case len(b.held) >= MaxHeld:
		return ErrFull
	}
	b.held[name] = heldFile{os.NewFile(uintptr(files[0]), name), conn}
	return nil
}
