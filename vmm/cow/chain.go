// Package cow is the copy-on-write disk of a sandbox: a raw base that many share, read-only layers over it, and a writable
// layer on top. FORMAT.md is the byte-level contract of a layer and says why a crash leaves it whole.
//
// A snapshot of a disk is its top frozen and an empty one put over it, a fork is the frozen layers with another top: both take
// the same time whatever the disk holds, on any file system. Merge makes one layer of several, with reflinks where there are
// any. Seal gives a frozen layer checksums of its data.
//
// A Chain is safe for concurrent use, and no request waits for another unless they write to the same blocks; Inspect, Verify,
// Seal and Merge may run beside chains that read the same layers. One process at a time may have a layer as its top. Memory: a
// quarter byte for each block of 4 KiB and each layer, where the layer has anything. The package is a leaf.
package cow

import (
	"errors"
	"fmt"
	"io"
	"os"
	"sync"
)

// ErrReadOnly is the answer to a write to a chain without a writable top.
var ErrReadOnly = errors.New("disk is read-only")

// ErrOutOfRange is the answer to an access that is not within the disk.
var ErrOutOfRange = errors.New("access past the end of the disk")

// Files are the open files of a disk.
type Files struct {
	Base   *os.File   // raw image; nil for zeros
	Layers []*os.File // read-only, oldest first
	Top    *os.File   // open for reading and writing: takes the writes; nil for a read-only disk
}

// Close closes them all.
func (f Files) Close() error {
	var errs []error
	for _, one := range append([]*os.File{f.Base, f.Top}, f.Layers...) {
		if one != nil {
			errs = append(errs, one.Close())
		}
	}
	return errors.Join(errs...)
}

// Chain is an open disk.
type Chain struct {
	size     int64
	readOnly bool
	base     *os.File // nil: zeros
	baseSize int64

	// writing keeps writes to the same blocks apart, and freezing from all of them.
	writing *exclusion

	// mu guards the list of layers and the map of the top, never while data is read or written. All other maps never change.
	mu     sync.RWMutex
	layers []*layer // oldest first; the top, if any, is the last
	top    *layer   // nil: read-only; changes only with writing locked whole

	// flushing makes flushes queue up. Lock order: flushing, writing, mu.
	flushing sync.Mutex
	// failed is the first failed fdatasync. The kernel reports a lost write once; whoever asks later must hear of it too.
	failed error
}

// OpenChain opens a disk by the paths of its files, see OpenFiles: base may be "" for zeros, top for a read-only disk.
func OpenChain(base string, layers []string, top string) (*Chain, error) {
	var f Files
	if err := f.open(base, layers, top); err != nil {
		return nil, errors.Join(fmt.Errorf("open disk: %w", err), f.Close())
	}
	return OpenFiles(f)
}

func (f *Files) open(base string, layers []string, top string) (err error) {
	if base != "" {
		if f.Base, err = os.Open(base); err != nil {
			return err
		}
	}
	for _, path := range layers {
		layer, err := os.Open(path)
		if err != nil {
			return err
		}
		f.Layers = append(f.Layers, layer)
	}
	if top != "" {
		f.Top, err = os.OpenFile(top, os.O_RDWR, 0)
	}
	return err
}

// OpenFiles opens a disk. The files are the chain's from the call on, whatever comes of it. All layers must be of one virtual
// size, at least the base's. ErrInUse (wrapped) says that another process has the top as its own.
func OpenFiles(f Files) (_ *Chain, err error) {
	defer func() {
		if err != nil {
			err = errors.Join(fmt.Errorf("open disk: %w", err), f.Close())
		}
	}()
	c := &Chain{base: f.Base, readOnly: f.Top == nil, writing: newExclusion()}
	if f.Base != nil {
		if c.baseSize, err = f.Base.Seek(0, io.SeekEnd); err != nil {
			return nil, err
		}
		c.size = c.baseSize
	}
	for _, one := range f.Layers {
		l, err := loadLayer(one.Name(), file{one})
		if err == nil {
			err = c.put(l)
		}
		if err != nil {
			return nil, err
		}
	}
	if f.Top != nil {
		top, err := loadTop(f.Top.Name(), file{f.Top})
		if err == nil {
			err = c.put(top)
		}
		if err != nil {
			return nil, err
		}
		c.top = top
	}
	if c.size == 0 || c.size < c.baseSize {
		return nil, fmt.Errorf("the disk has %d bytes, its base %d", c.size, c.baseSize)
	}
	return c, nil
}

// loadTop reads a layer that is going to be written.
func loadTop(path string, f storage) (*layer, error) {
	if err := f.lock(); err != nil {
		return nil, err
	}
	l, err := loadLayer(path, f)
	if err == nil && l.frozen() {
		err = fmt.Errorf("%s: %w", path, ErrSealed)
	}
	return l, err
}

// put puts l on top of the layers.
func (c *Chain) put(l *layer) error {
	if len(c.layers) > 0 && l.virtualSize != c.size {
		return fmt.Errorf("%s is for a disk of %d bytes, the layers below it for one of %d", l.path, l.virtualSize, c.size)
	}
	c.layers = append(c.layers, l)
	c.size = l.virtualSize
	return nil
}

// Size returns the size of the disk in bytes.
func (c *Chain) Size() int64 { return c.size }

// ReadOnly reports whether the disk has no writable top.
func (c *Chain) ReadOnly() bool { return c.readOnly }

// Close closes the files. It does not flush.
func (c *Chain) Close() error {
	var errs []error
	for _, l := range c.layers {
		errs = append(errs, l.f.Close())
	}
	if c.base != nil {
		errs = append(errs, c.base.Close())
	}
	return errors.Join(errs...)
}

func (c *Chain) check(off, n int64) error {
	if off < 0 || n < 0 || off > c.size || n > c.size-off {
		return ErrOutOfRange
	}
	return nil
}

// ReadAt fills p from the disk at off, at any alignment.
func (c *Chain) ReadAt(p []byte, off int64) (int, error) {
	err := c.ReadV([][]byte{p}, off, clearPlain)
	if err != nil {
		return 0, err
	}
	return len(p), nil
}

func clearPlain(p []byte) error {
	clear(p)
	return nil
}

// ReadV fills bufs from the disk at off, at any alignment, and uses up the slice bufs. Where the disk is zero it has clear do
// it, since memory that may fault needs care; the kernel does all else. After an error the buffers may hold anything.
func (c *Chain) ReadV(bufs [][]byte, off int64, clear func([]byte) error) error {
	n := vec(bufs).bytes()
	if err := c.check(off, n); err != nil {
		return err
	}
	cut := cutter{left: bufs}
	for n > 0 {
		first := off / BlockSize
		from, s, run := c.find(first, (off+n-1)/BlockSize-first+1)
		piece := min(n, (first+run)*BlockSize-off)
		v := cut.next(piece)
		var err error
		switch {
		case from != nil && s == data:
			err = from.readv(v, off)
		case from != nil:
			err = clearAll(v, clear)
		default:
			err = c.readBase(v, off, clear)
		}
		if err != nil {
			return err
		}
		off, n = off+piece, n-piece
	}
	return nil
}

func clearAll(v vec, clear func([]byte) error) error {
	for _, b := range v {
		if err := clear(b); err != nil {
			return err
		}
	}
	return nil
}

// find returns the newest layer that has block b and what it is there, nil if none has it, and how many blocks from b on, at
// most limit, are found in the same place.
func (c *Chain) find(b, limit int64) (*layer, blockState, int64) {
	c.mu.RLock()
	defer c.mu.RUnlock()
	for i := len(c.layers) - 1; i >= 0; i-- {
		s, n := c.layers[i].m.run(b, limit)
		limit = n
		if s != absent {
			return c.layers[i], s, n
		}
	}
	return nil, absent, limit
}

// readBase reads what the base has and clears what lies past its end.
func (c *Chain) readBase(v vec, off int64, clear func([]byte) error) error {
	n := v.bytes()
	there := max(min(n, c.baseSize-off), 0)
	cut := cutter{left: v}
	if there > 0 {
		got, err := file{c.base}.readv(cut.next(there), off)
		if err == nil && got < there {
			err = io.ErrUnexpectedEOF // it was cut short since it was opened
		}
		if err != nil {
			return fmt.Errorf("read disk base: %w", err)
		}
	}
	return clearAll(cut.next(n-there), clear)
}
