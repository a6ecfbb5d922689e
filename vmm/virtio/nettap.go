package virtio

import (
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// netHeaderBytes is struct virtio_net_hdr_v1 (virtio 1.2, section 5.1.6): flags u8, gso_type u8, hdr_len u16, gso_size u16,
// csum_start u16, csum_offset u16, num_buffers u16. It precedes every frame, in a queue as on the tap.
const (
	netHeaderBytes   = 12
	netNumBuffersOff = 10
)

// Lengths of a frame, in bytes, without the header: an Ethernet header, and 64 KiB behind one with a VLAN tag.
const (
	netMinFrame = 14
	netMaxFrame = 18 + 64<<10
)

// Flags and types in a header.
const (
	netNeedsCsum = 1

	netGSONone  = 0
	netGSOTCPv4 = 1
	netGSOTCPv6 = 4
)

// ErrTap is wrapped by the errors about a file that is no tap, or not one as it must be.
var ErrTap = errors.New("not a usable tap")

// errTapGone is wrapped by the reason for which a tap serves no more.
var errTapGone = errors.New("tap has gone away")

// tap is the host's end of the wire: one frame for each system call. Reads and writes may go on at once, one of each.
type tap struct {
	file    *os.File
	conn    syscall.RawConn
	offload func(fd int, flags uint) error
}

// openTap duplicates file, so that it is known to the runtime's poller whatever the caller opened it as.
func openTap(file *os.File, offload func(int, uint) error) (*tap, error) {
	fd := -1
	err := control(file, func(old int) (err error) {
		if fd, err = unix.FcntlInt(uintptr(old), unix.F_DUPFD_CLOEXEC, 0); err != nil {
			return os.NewSyscallError("fcntl", err)
		}
		return os.NewSyscallError("fcntl", unix.SetNonblock(fd, true))
	})
	t := &tap{offload: offload}
	if fd >= 0 {
		t.file = os.NewFile(uintptr(fd), file.Name())
	}
	if err == nil {
		t.conn, err = t.file.SyscallConn()
	}
	if err == nil {
		err = t.release()
	}
	if err != nil {
		_ = t.file.Close() // nothing was written; nil is fine
		return nil, fmt.Errorf("open tap: %w", err)
	}
	return t, nil
}

// control runs f on the file's descriptor.
func control(file *os.File, f func(fd int) error) error {
	conn, err := file.SyscallConn()
	if err != nil {
		return err
	}
	if cerr := conn.Control(func(fd uintptr) { err = f(int(fd)) }); cerr != nil {
		return cerr
	}
	return err
}

// interrupt makes reads and writes that wait fail, now and until release. errInterrupted is what they fail with.
func (t *tap) interrupt() { _ = t.file.SetDeadline(time.Unix(1, 0)) } // as release did at the start

func (t *tap) release() error { return t.file.SetDeadline(time.Time{}) }

var errInterrupted = os.ErrDeadlineExceeded

// setOffloads tells the tap which frames to pass unsegmented and without checksums, and how long headers are. Both are
// properties of the open file, which a snapshot does not have.
func (t *tap) setOffloads(flags uint) error {
	if err := control(t.file, func(fd int) error { return t.offload(fd, flags) }); err != nil {
		return fmt.Errorf("set up tap: %w", err)
	}
	return nil
}

// TapRequests returns the number of every ioctl that is issued on a tap: what a filter of system calls must let through.
func TapRequests() []uint32 {
	return []uint32{unix.TUNSETVNETHDRSZ, unix.TUNSETOFFLOAD, unix.TUNGETIFF}
}

// setTapOffloads does that to a real tap.
func setTapOffloads(fd int, flags uint) error {
	if err := unix.IoctlSetPointerInt(fd, unix.TUNSETVNETHDRSZ, netHeaderBytes); err != nil {
		return os.NewSyscallError("TUNSETVNETHDRSZ", err)
	}
	return os.NewSyscallError("TUNSETOFFLOAD", unix.IoctlSetInt(fd, unix.TUNSETOFFLOAD, int(flags)))
}

// tapOffloads is TUNSETOFFLOAD's argument for the features a driver chose. Those it must not choose alone (section 5.1.3.1)
// are an error.
func tapOffloads(features uint64) (flags uint, err error) {
	for _, f := range []struct {
		feature, needs uint64
		flag           uint
	}{
		{netGuestCsum, 0, unix.TUN_F_CSUM},
		{netGuestTSO4, netGuestCsum, unix.TUN_F_TSO4},
		{netGuestTSO6, netGuestCsum, unix.TUN_F_TSO6},
		{netHostTSO4, netCsum, 0}, // what comes from the guest is not the tap's to refuse
		{netHostTSO6, netCsum, 0},
	} {
		if features&f.feature == 0 {
			continue
		}
		if features&f.needs != f.needs {
			return 0, fmt.Errorf("the driver chose feature %#x without %#x, on which it depends", f.feature, f.needs)
		}
		flags |= f.flag
	}
	return flags, nil
}

// checkTap reports a file that is no tap with the headers expected. IFF_NO_PI cannot be told: TUNGETIFF says IFF_NOFILTER by the
// same bit.
func checkTap(file *os.File) error {
	var flags uint16
	err := control(file, func(fd int) error {
		ifr, err := unix.NewIfreq("")
		if err == nil {
			err = os.NewSyscallError("TUNGETIFF", unix.IoctlIfreq(fd, unix.TUNGETIFF, ifr))
		}
		if err == nil {
			flags = ifr.Uint16()
		}
		return err
	})
	const want = unix.IFF_TAP | unix.IFF_VNET_HDR
	switch {
	case err != nil:
		return fmt.Errorf("%w: %s: %w", ErrTap, file.Name(), err)
	case flags&(want|unix.IFF_TUN) != want:
		return fmt.Errorf("%w: %s has flags %#x, want IFF_TAP and IFF_VNET_HDR", ErrTap, file.Name(), flags)
	}
	return nil
}

// checkFrame makes a guest's header safe for the host's kernel, which gets this copy of it: it asks for nothing that was not
// negotiated or does not fit a frame of the given length. It reports false if there is nothing to be made of it.
func checkFrame(h *[netHeaderBytes]byte, features, frame uint64) bool {
	le := binary.LittleEndian
	h[0] &= netNeedsCsum // a driver must not set the others, and a device must ignore them (section 5.1.6.2)
	le.PutUint16(h[netNumBuffersOff:], 0)
	if h[0] != 0 {
		end := uint64(le.Uint16(h[6:])) + uint64(le.Uint16(h[8:])) + 2
		if features&netCsum == 0 || end > frame {
			return false
		}
	}
	switch h[1] {
	case netGSONone:
		le.PutUint16(h[2:], 0) // hdr_len and gso_size say something of segments only
		le.PutUint16(h[4:], 0)
		return true
	case netGSOTCPv4:
		if features&netHostTSO4 == 0 {
			return false
		}
	case netGSOTCPv6:
		if features&netHostTSO6 == 0 {
			return false
		}
	default:
		return false
	}
	return h[0] != 0 && le.Uint16(h[4:]) != 0 && uint64(le.Uint16(h[2:])) <= frame
}
