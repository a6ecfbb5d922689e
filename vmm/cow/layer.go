package cow

import (
	"errors"
	"fmt"
	"io"
	"os"

	"golang.org/x/sys/unix"
)

// ErrInUse means that another process has the layer open for writing.
var ErrInUse = errors.New("disk layer is in use by another process")

// Info describes a layer.
type Info struct {
	VirtualSize int64 // bytes
	DataBlocks  int64 // blocks of BlockSize stored
	ZeroBlocks  int64 // blocks known to be zero, which take no room
}

// Create makes an empty layer at path, which must not exist, for a disk of virtualSize bytes. It takes a few KiB whatever the
// size. It is durable after the first Flush of a chain it is the top of; the directory is the caller's to sync.
func Create(path string, virtualSize int64) error {
	h, err := newHeader(virtualSize)
	if err != nil {
		return fmt.Errorf("create disk layer: %w", err)
	}
	f, err := os.OpenFile(path, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return fmt.Errorf("create disk layer: %w", err)
	}
	_, err = f.Write(h.marshal())
	if err == nil {
		err = f.Truncate(h.fileSize())
	}
	if err = errors.Join(err, f.Close()); err != nil {
		return fmt.Errorf("create disk layer: %w", errors.Join(err, os.Remove(path)))
	}
	return nil
}

// Inspect reads what a layer says of itself. It checks header and map as opening it does; a layer that is being written may
// have more than Inspect tells.
func Inspect(path string) (Info, error) {
	l, err := openLayer(path, false)
	if err != nil {
		return Info{}, err
	}
	info := Info{VirtualSize: l.virtualSize, DataBlocks: l.m.count(data), ZeroBlocks: l.m.count(zero)}
	return info, l.f.Close()
}

// Verify checks all there is to check in a layer: header, map, size, and that every stored block can be read.
func Verify(path string) error {
	l, err := openLayer(path, false)
	if err != nil {
		return err
	}
	defer l.f.Close()
	buf := make([]byte, copyBytes)
	return l.eachData(func(b, n int64) error { return l.read(buf[:n*BlockSize], b) })
}

// storage is what a layer lies on: a file, or in tests a disk that loses what was not synced.
type storage interface {
	io.ReaderAt
	io.WriterAt
	io.Closer
	size() (int64, error)
	// sync returns once all that was written before it is durable.
	sync() error
	// punch makes n bytes at off zero and gives their room back. It is an economy: where it cannot be had, nothing happens.
	punch(off, n int64)
}

// layer is an open layer. The map is guarded by whoever owns the layer.
type layer struct {
	header
	path string
	f    storage
	m    *blockMap
}

func openLayer(path string, writable bool) (*layer, error) {
	mode := os.O_RDONLY
	if writable {
		mode = os.O_RDWR
	}
	f, err := os.OpenFile(path, mode, 0)
	if err != nil {
		return nil, fmt.Errorf("open disk layer: %w", err)
	}
	if writable {
		err = lock(f)
	}
	var l *layer
	if err == nil {
		l, err = loadLayer(path, file{f})
	}
	if err != nil {
		return nil, errors.Join(err, f.Close())
	}
	return l, nil
}

// lock keeps a second writer out until the file is closed, be it by the process's death.
func lock(f *os.File) error {
	for {
		err := unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB)
		switch {
		case errors.Is(err, unix.EINTR):
			continue
		case errors.Is(err, unix.EWOULDBLOCK):
			return fmt.Errorf("%s: %w", f.Name(), ErrInUse)
		}
		return os.NewSyscallError("flock", err)
	}
}

// loadLayer reads header and map of the layer on f; path is what errors call it.
func loadLayer(path string, f storage) (*layer, error) {
	first := make([]byte, headerBytes)
	if _, err := f.ReadAt(first, 0); err != nil && !errors.Is(err, io.EOF) {
		return nil, fmt.Errorf("read disk layer: %w", err)
	}
	h, err := unmarshalHeader(first)
	if err != nil {
		return nil, &CorruptError{path, "header", err.Error()}
	}
	size, err := f.size()
	if err != nil {
		return nil, fmt.Errorf("read disk layer: %w", err)
	}
	if size != h.fileSize() {
		return nil, &CorruptError{path, "file size", fmt.Sprintf("%d bytes, expected %d", size, h.fileSize())}
	}
	raw := make([]byte, h.dataOffset()-headerBytes)
	if _, err := f.ReadAt(raw, headerBytes); err != nil {
		return nil, fmt.Errorf("read disk layer: %w", err)
	}
	l := &layer{header: h, path: path, f: f, m: newBlockMap(h)}
	if err := l.m.load(raw); err != nil {
		return nil, &CorruptError{path, "map", err.Error()}
	}
	return l, nil
}

// read fills p, whole blocks or a part of one, from block b on.
func (l *layer) read(p []byte, b int64) error { return l.readAt(p, b*BlockSize) }

func (l *layer) readAt(p []byte, off int64) error {
	if _, err := l.f.ReadAt(p, l.dataOffset()+off); err != nil {
		return fmt.Errorf("read disk layer: %w", err)
	}
	return nil
}

func (l *layer) writeAt(p []byte, off int64) error {
	if _, err := l.f.WriteAt(p, l.dataOffset()+off); err != nil {
		return fmt.Errorf("write disk layer: %w", err)
	}
	return nil
}

// punch gives back the room of n blocks from b on.
func (l *layer) punch(b, n int64) { l.f.punch(l.dataOffset()+b*BlockSize, n*BlockSize) }

// copyBytes is how much is read at once by those who go through a whole layer, in bytes.
const copyBytes = 1 << 20

// eachData calls f for every run of stored blocks, in pieces of at most copyBytes.
func (l *layer) eachData(f func(b, n int64) error) error {
	for b := int64(0); b < l.blocks(); {
		s, n := l.m.run(b, l.blocks()-b)
		for end := b + n; b < end; {
			piece := min(end-b, copyBytes/BlockSize)
			if s != data {
				piece = end - b
			} else if err := f(b, piece); err != nil {
				return err
			}
			b += piece
		}
	}
	return nil
}
