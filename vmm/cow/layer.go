package cow

import (
	"errors"
	"fmt"
	"io"
	"os"
)

// Errors about who may do what with a layer.
var (
	// ErrInUse means that another process has the layer open for writing.
	ErrInUse = errors.New("disk layer is in use by another process")
	// ErrSealed means that the layer was sealed and is never written again.
	ErrSealed = errors.New("disk layer is sealed")
)

// Info describes a layer.
type Info struct {
	Version     uint32 // of the format
	VirtualSize int64  // bytes
	DataBlocks  int64  // blocks of BlockSize stored
	ZeroBlocks  int64  // blocks known to be zero, which take no room
	Sealed      bool   // its data has checksums
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
	l, err := openLayer(path)
	if err != nil {
		return Info{}, err
	}
	info := Info{
		Version: l.version, VirtualSize: l.virtualSize,
		DataBlocks: l.m.count(data), ZeroBlocks: l.m.count(zero), Sealed: l.sealed,
	}
	return info, l.f.Close()
}

// layer is an open layer. The map is guarded by whoever owns the layer.
type layer struct {
	header
	path   string
	f      storage
	m      *blockMap
	sealed bool
}

// openLayer opens a layer for reading.
func openLayer(path string) (*layer, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, fmt.Errorf("open disk layer: %w", err)
	}
	l, err := loadLayer(path, file{f})
	if err != nil {
		return nil, errors.Join(err, f.Close())
	}
	return l, nil
}

// loadLayer reads header, map and seal of the layer on f; path is what errors call it.
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
	grown := h.version != oldVersion && size == h.sealedSize()
	if size != h.fileSize() && !grown {
		return nil, &CorruptError{path, "file size", fmt.Sprintf("%d bytes, expected %d", size, h.fileSize())}
	}
	l := &layer{header: h, path: path, f: f, m: newBlockMap(h)}
	err = l.loadMap()
	if err == nil && grown {
		l.sealed, err = l.readSeal()
	}
	if err != nil {
		return nil, err
	}
	return l, nil
}

// loadMap reads the map, piece by piece.
func (l *layer) loadMap() error {
	end := l.dataOffset()
	buf := make([]byte, min(end-headerBytes, loadPieceBytes))
	for at := int64(headerBytes); ; at += int64(len(buf)) {
		if at < end { // most of a new layer's map is a hole
			next, err := l.f.next(at)
			if err != nil {
				return fmt.Errorf("read disk layer: %w", err)
			}
			at = max(at, next-next%sectorBytes)
		}
		if at >= end {
			return nil
		}
		buf = buf[:min(int64(len(buf)), end-at)]
		if _, err := l.f.ReadAt(buf, at); err != nil {
			return fmt.Errorf("read disk layer: %w", err)
		}
		if err := l.m.load((at-headerBytes)/sectorBytes, buf); err != nil {
			return &CorruptError{l.path, "map", err.Error()}
		}
	}
}

// mapPieceBytes is how much of a map is written at once.
const mapPieceBytes = 256 << 10

// loadPieceBytes is how much of a map is read at once when a disk is opened: a wake waits for it, and for the memory it takes.
const loadPieceBytes = 32 << 10

// read fills p, whole blocks, from block b on.
func (l *layer) read(p []byte, b int64) error {
	if _, err := l.f.ReadAt(p, l.dataOffset()+b*BlockSize); err != nil {
		return fmt.Errorf("read disk layer: %w", err)
	}
	return nil
}

// readv fills v from the offset off of the disk on.
func (l *layer) readv(v vec, off int64) error {
	want := v.bytes()
	n, err := l.f.readv(v, l.dataOffset()+off)
	if err == nil && n < want {
		err = io.ErrUnexpectedEOF // it was cut short since it was opened
	}
	if err != nil {
		return fmt.Errorf("read disk layer: %w", err)
	}
	return nil
}

func (l *layer) writev(v vec, off int64) error {
	if err := l.f.writev(v, l.dataOffset()+off); err != nil {
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
