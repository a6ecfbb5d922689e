package snapshot

import (
	"errors"
	"fmt"
	"io"
	"os"

	"golang.org/x/sys/unix"
)

// ZeroSum is the checksum of n zero bytes, n at most ChunkBytes.
func ZeroSum(n int) uint32 {
	if n == ChunkBytes {
		return zeroChunkSum
	}
	return Checksum(make([]byte, n))
}

var zeroChunkSum = Checksum(make([]byte, ChunkBytes))

// VerifyFlat compares a flat memory image with the checksums of a state. Holes of a file are not read: they are zeros.
func VerifyFlat(r io.ReaderAt, memoryBytes uint64, sums []uint32) error {
	buf := make([]byte, ChunkBytes)
	data := uint64(0) // before this offset and from the current one on, there is a hole
	for i, sum := range sums {
		off := uint64(i) * ChunkBytes
		b := buf[:min(ChunkBytes, memoryBytes-off)]
		part := fmt.Sprintf("memory, bytes %d-%d", off, off+uint64(len(b))-1)
		if data < off {
			data = NextData(r, off, memoryBytes)
		}
		if data >= off+uint64(len(b)) {
			if sum != ZeroSum(len(b)) {
				return bad(part, ErrChecksum)
			}
			continue
		}
		if n, err := r.ReadAt(b, int64(off)); n < len(b) {
			return badOrIO(part, err)
		}
		if Checksum(b) != sum {
			return bad(part, ErrChecksum)
		}
	}
	return nil
}

// NextData returns where the next data of a sparse flat image begins: off if that cannot be told, end if there is only a hole
// left up to the end. A file shorter than end has data at its end: reading it there tells. It moves the file's seek position.
func NextData(r io.ReaderAt, off, end uint64) uint64 {
	f, ok := r.(*os.File)
	if !ok {
		return off
	}
	if info, err := f.Stat(); err != nil || uint64(info.Size()) < end {
		return off
	}
	at, err := f.Seek(int64(off), unix.SEEK_DATA)
	switch {
	case errors.Is(err, unix.ENXIO):
		return end
	case err != nil:
		return off
	}
	return uint64(at)
}

// VerifyState reads a state file and checks every byte of it.
func VerifyState(path string) error {
	_, err := ReadState(path)
	return err
}

// InspectState reads and verifies a state file for display. Register blocks and device states are in it, as bytes.
func InspectState(path string) (*State, error) { return ReadState(path) }

// InspectLayer reads and verifies the header and table of a memory layer, which errors call by label.
func InspectLayer(path, label string) (info LayerInfo, runs []Run, err error) {
	err = withFile(path, func(f *os.File) error {
		l, err := OpenLayer(f, label)
		if err == nil {
			info, runs = l.Info, l.Runs
		}
		return err
	})
	return info, runs, err
}

// VerifyLayer checks every byte of a memory layer, which errors call by label, and returns its header.
func VerifyLayer(path, label string) (info LayerInfo, err error) {
	err = withFile(path, func(f *os.File) error {
		l, err := OpenLayer(f, label)
		if err != nil {
			return err
		}
		info = l.Info
		return l.Verify()
	})
	return info, err
}

// VerifyLayers checks every byte of memory layers, oldest first, that they lie upon one another, and that they belong to the state.
func VerifyLayers(s *State, paths ...string) error {
	var layers []*Layer
	for i, path := range paths {
		label := LayerLabel(i)
		info, err := VerifyLayer(path, label)
		if err != nil {
			return err
		}
		layers = append(layers, &Layer{Info: info, label: label})
	}
	return s.Owns(layers)
}

// VerifyMemory checks the flat image that belongs to the state: its memory file if that is full, its base if it is a diff.
func VerifyMemory(path string, s *State) error {
	return withFile(path, func(f *os.File) error { return VerifyFlat(f, s.Shape.MemoryBytes, s.Memory.Sums) })
}

// LayerLabel is what errors call the layer with an index in a chain.
func LayerLabel(index int) string { return fmt.Sprintf("memory layer %d", index+1) }

// Owns reports, as an *Error, whether these layers, oldest first, are the memory that was saved together with s.
func (s *State) Owns(layers []*Layer) error {
	if (s.Memory.Kind == Diff) != (len(layers) > 0) {
		return bad("state", fmt.Errorf("%w: its memory is of kind %v, and there are %d layers", ErrMismatch, s.Memory.Kind, len(layers)))
	}
	if len(layers) == 0 {
		return nil
	}
	if err := CheckChain(s.Base(), layers); err != nil {
		return err
	}
	newest := layers[len(layers)-1]
	if s.ID != newest.Info.ID || s.Shape.MemoryBytes != newest.Info.MemoryBytes || !s.Memory.Top.IsZero() && s.Memory.Top != newest.Info.Name() {
		return bad(newest.label+", header", fmt.Errorf("%w: it is of %v, the state of %v", ErrMismatch, newest.Info.ID, s.ID))
	}
	return nil
}

// Base names the flat image whose checksums the state has.
func (s *State) Base() Digest { return BaseDigest(s.Shape.MemoryBytes, s.Memory.Sums) }

func withFile(path string, f func(*os.File) error) error {
	file, err := os.Open(path)
	if err != nil {
		return fmt.Errorf("open snapshot: %w", err)
	}
	defer func() { _ = file.Close() }()
	return f(file)
}
