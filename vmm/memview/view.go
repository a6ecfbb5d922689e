// Package memview makes copy-on-write views of this process's memory: what it was at one instant, readable while the process
// goes on.
//
// A view is a child process, made by a plain clone. The kernel copies page tables, so that the process stands still for as long
// as that takes, and then copies each page that either of the two writes. The child is not Go: it never returns from the
// assembly that made it, has no stack, no signal handlers that could run and no files but two pipes, and does nothing but copy
// what it is asked for into memory that both share. It ends when its parent closes the pipe, or is gone.
//
// A page that cannot be read (its file was cut short) ends the child, and so the view: the error is ErrLost.
package memview

import (
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"runtime"
	"sync"

	"golang.org/x/sys/unix"
)

// MaxRead is how many bytes one Read takes at most.
const MaxRead = 1 << 20

// maxPieces is how many pieces they may be in.
const maxPieces = 1024

// buffers is how many Reads may be under way.
const buffers = 4

// The layout of the shared memory; fork_amd64.s knows it, too.
const (
	countAt    = 0
	piecesAt   = 16
	pieceBytes = 24

	headerBytes = 64 << 10
	sharedBytes = headerBytes + buffers*MaxRead
)

// ErrLost means that the view is gone: the child could not read a page, or was ended.
var ErrLost = errors.New("the view of memory is lost")

// View is memory as it was when the view was taken. It is safe for concurrent use.
type View struct {
	pid      int
	shared   []byte
	free     chan []byte // buffers in shared that nobody uses
	asking   sync.Mutex  // one request at a time
	request  *os.File
	response *os.File
}

// Piece is a piece of this process's memory that was there when the view was taken, and that none but the caller's data lies in.
type Piece struct {
	Addr uintptr
	Len  int
}

// Take takes a view of the whole process. Close ends it.
func Take() (_ *View, err error) {
	v := &View{free: make(chan []byte, buffers)}
	v.shared, err = unix.Mmap(-1, 0, sharedBytes, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED|unix.MAP_ANONYMOUS)
	if err != nil {
		return nil, fmt.Errorf("take a view of memory: %w", os.NewSyscallError("mmap", err))
	}
	defer func() {
		if err != nil {
			err = errors.Join(fmt.Errorf("take a view of memory: %w", err), v.Close())
		}
	}()
	for at := headerBytes; at < sharedBytes; at += MaxRead {
		v.free <- v.shared[at : at+MaxRead : at+MaxRead]
	}
	var ask, answer [2]int
	if ask, err = pipe(); err != nil {
		return nil, err
	}
	v.request = file(ask[1], "request")
	defer func() { _ = unix.Close(ask[0]) }() // the child has it
	if answer, err = pipe(); err != nil {
		return nil, err
	}
	v.response = file(answer[0], "response")
	defer func() { _ = unix.Close(answer[1]) }()
	return v, v.fork(ask[0], answer[1])
}

// pipe makes one. Its end that stays here is made non-blocking by file: so closing it wakes whoever waits there.
func pipe() (ends [2]int, err error) {
	return ends, os.NewSyscallError("pipe2", unix.Pipe2(ends[:], unix.O_CLOEXEC))
}

func file(fd int, name string) *os.File {
	_ = unix.SetNonblock(fd, true) // of a pipe's end: cannot fail
	return os.NewFile(uintptr(fd), "view "+name)
}

// fork makes the child, with all signals blocked: none may run a handler there, and a fault ends it.
func (v *View) fork(request, response int) error {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	var all, before unix.Sigset_t
	for i := range all.Val {
		all.Val[i] = ^uint64(0)
	}
	if err := unix.PthreadSigmask(unix.SIG_SETMASK, &all, &before); err != nil {
		return os.NewSyscallError("rt_sigprocmask", err)
	}
	pid := fork(address(v.shared), uintptr(request), uintptr(response))
	if err := unix.PthreadSigmask(unix.SIG_SETMASK, &before, nil); err != nil {
		return os.NewSyscallError("rt_sigprocmask", err)
	}
	if pid < 0 {
		return os.NewSyscallError("clone", unix.Errno(-pid))
	}
	v.pid = pid
	return nil
}

// Read calls f with the contents of pieces, one behind the other, MaxRead bytes at most. The slice is f's during the call.
func (v *View) Read(pieces []Piece, f func(b []byte) error) error {
	b := <-v.free
	defer func() { v.free <- b }()
	n, err := v.fetch(b, pieces)
	if err != nil {
		return err
	}
	return f(b[:n])
}

// fetch has the child copy pieces to b.
func (v *View) fetch(b []byte, pieces []Piece) (n int, err error) {
	if len(pieces) > maxPieces {
		return 0, fmt.Errorf("read a view of memory: %d pieces", len(pieces))
	}
	v.asking.Lock()
	defer v.asking.Unlock()
	to, at := address(b), piecesAt
	for _, p := range pieces {
		if p.Len < 0 || p.Len > len(b)-n {
			return 0, fmt.Errorf("read a view of memory: more than %d bytes", len(b))
		}
		for i, word := range []uint64{uint64(p.Addr), uint64(to) + uint64(n), uint64(p.Len)} {
			binary.LittleEndian.PutUint64(v.shared[at+8*i:], word)
		}
		at += pieceBytes
		n += p.Len
	}
	binary.LittleEndian.PutUint64(v.shared[countAt:], uint64(len(pieces)))
	var one [1]byte
	if _, err := v.request.Write(one[:]); err != nil {
		return 0, fmt.Errorf("%w: %w", ErrLost, err)
	}
	if _, err := v.response.Read(one[:]); err != nil {
		return 0, fmt.Errorf("%w: %w", ErrLost, err)
	}
	return n, nil
}

// Close ends the view. No Read may be under way.
func (v *View) Close() error {
	var errs []error
	for _, f := range []*os.File{v.request, v.response} {
		if f != nil {
			errs = append(errs, f.Close())
		}
	}
	if v.pid > 0 {
		errs = append(errs, v.reap())
	}
	return errors.Join(append(errs, unix.Munmap(v.shared))...)
}

// reap waits for the child's end, which the closed pipe has brought about.
func (v *View) reap() error {
	for {
		_, err := unix.Wait4(v.pid, nil, 0, nil)
		if !errors.Is(err, unix.EINTR) {
			return os.NewSyscallError("wait4", err)
		}
	}
}
