package guestmem

import (
	"os"

	"golang.org/x/sys/unix"
)

// Discard gives the whole pages within the n bytes at a back to the host, and returns how many bytes those were. What of the
// range is not RAM, and pages that are only partly in it, are left alone.
//
// A discarded page takes no room until it is touched again. It then holds what is below it: zeros in anonymous memory, the
// file's bytes in a private mapping of a file. So its contents are undefined for whoever discards it, as virtio allows for
// ballooned and reported pages (virtio 1.2, sections 5.5.6 and 5.5.6.7; it would take VIRTIO_BALLOON_F_PAGE_POISON to promise
// more), but they are defined for a snapshot: a page that is no longer anonymous equals its file.
//
// A bad page costs an error of the operating system, wrapped; the pages before it may have been discarded.
func (m *Memory) Discard(a Addr, n uint64) (uint64, error) {
	end := a + Addr(n)
	if end < a {
		end = ^Addr(0)
	}
	done := uint64(0)
	for _, r := range m.regions {
		first, last := max(a, r.GPA), min(end, r.end())
		if first >= last {
			continue
		}
		// Within the region, so neither can wrap.
		first, last = r.GPA+(first-r.GPA+PageSize-1)&^(PageSize-1), last&^(PageSize-1)
		if first >= last {
			continue
		}
		if err := unix.Madvise(r.Bytes[first-r.GPA:last-r.GPA], unix.MADV_DONTNEED); err != nil {
			return done, &AccessError{Addr: first, Len: uint64(last - first), Err: os.NewSyscallError("madvise", err)}
		}
		done += uint64(last - first)
	}
	return done, nil
}
