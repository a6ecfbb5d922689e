// Package initramfs writes the guest's first root file system: envd as /init and the kernel modules it loads before it can
// see the real root. Equal inputs give equal bytes.
package initramfs

import (
	"bufio"
	"fmt"
	"io"
	"math"
	"strings"
)

// File types of a cpio entry's mode (Linux initramfs buffer format, Documentation/driver-api/early-userspace/buffer-format.rst).
const (
	typeDir     = 0o040000
	typeRegular = 0o100000
	typeChar    = 0o020000
)

// trailer is the name of the entry that ends an archive.
const trailer = "TRAILER!!!"

// entry is one file of the archive.
type entry struct {
	name         string // without a leading slash
	mode         uint32 // type and permissions
	major, minor uint32 // of a device node
	content      []byte
}

// writeArchive writes entries in order in the "newc" format: a header of 6 + 13×8 ASCII digits, the name, the content,
// each padded to 4 bytes. Owners are root, times are 0, inodes are numbered in order.
func writeArchive(w io.Writer, entries []entry) error {
	cw := &countingWriter{w: bufio.NewWriter(w)}
	for i, e := range entries {
		if err := checkEntry(e); err != nil {
			return err
		}
		writeEntry(cw, uint32(i+1), e)
	}
	writeEntry(cw, 0, entry{name: trailer})
	if cw.err == nil {
		cw.err = cw.w.Flush()
	}
	if cw.err != nil {
		return fmt.Errorf("write the initramfs: %w", cw.err)
	}
	return nil
}

func checkEntry(e entry) error {
	if e.name == "" || e.name == trailer || strings.HasPrefix(e.name, "/") || strings.ContainsRune(e.name, 0) {
		return fmt.Errorf("initramfs: %q cannot be a file's name", e.name)
	}
	if len(e.content) > math.MaxUint32 {
		return fmt.Errorf("initramfs: %s is too large (%d bytes)", e.name, len(e.content))
	}
	return nil
}

func writeEntry(w *countingWriter, ino uint32, e entry) {
	links := 1
	if e.mode&typeDir != 0 && e.mode&typeRegular == 0 {
		links = 2
	}
	const uid, gid, mtime, devMajor, devMinor, checksum = 0, 0, 0, 0, 0, 0
	w.printf("070701%08x%08x%08x%08x%08x%08x%08x%08x%08x%08x%08x%08x%08x",
		ino, e.mode, uid, gid, links, mtime, len(e.content), devMajor, devMinor, e.major, e.minor, len(e.name)+1, checksum)
	w.printf("%s\x00", e.name)
	w.pad()
	w.write(e.content)
	w.pad()
}

// countingWriter pads, and keeps the first error.
type countingWriter struct {
	w   *bufio.Writer
	n   int64
	err error
}

func (c *countingWriter) write(p []byte) {
	if c.err == nil {
		_, c.err = c.w.Write(p)
		c.n += int64(len(p))
	}
}

func (c *countingWriter) printf(format string, args ...any) {
	c.write(fmt.Appendf(nil, format, args...))
}

func (c *countingWriter) pad() { c.write(make([]byte, -c.n&3)) }
