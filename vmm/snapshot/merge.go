package snapshot

import (
	"errors"
	"fmt"
	"os"
	"slices"

	"golang.org/x/sys/unix"
)

// Merge writes one layer to dst, an empty file, that stands for several, oldest first: it lies upon what the oldest lies upon, and
// goes by the name of the newest. dst is durable when Merge returns; publishing it is the caller's. What of the layers' data is
// copied whole keeps its checksum unread, so that damage stays damage; the rest is verified.
func Merge(dst *os.File, layers ...*os.File) (LayerInfo, error) {
	info, err := merge(dst, layers)
	if err == nil {
		err = os.NewSyscallError("fdatasync", unix.Fdatasync(int(dst.Fd())))
	}
	if err != nil {
		return LayerInfo{}, fmt.Errorf("merge memory layers: %w", err)
	}
	return info, nil
}

func merge(dst *os.File, files []*os.File) (LayerInfo, error) {
	if len(files) == 0 {
		return LayerInfo{}, errors.New("there are none")
	}
	layers := make([]*Layer, len(files))
	for i, f := range files {
		var err error
		if layers[i], err = OpenLayer(f, fmt.Sprintf("memory layer %d", i+1)); err != nil {
			return LayerInfo{}, err
		}
	}
	oldest, newest := layers[0].Info, layers[len(layers)-1].Info
	if oldest.Version == 1 { // it does not say: its base is what the others say, and its parent
		oldest.Base, oldest.Parent = newest.Base, newest.Base
	}
	if oldest.Base.IsZero() {
		return LayerInfo{}, bad(layers[0].label+", header", fmt.Errorf("%w: of version 1, it cannot be merged alone", ErrVersion))
	}
	if err := checkChain(oldest.Base, oldest.Parent, layers); err != nil {
		return LayerInfo{}, err
	}
	b := NewLayerBuilder(LayerInfo{
		ID: newest.ID, MemoryBytes: newest.MemoryBytes, Base: oldest.Base, Parent: oldest.Parent, Replaces: newest.Name(),
	})
	c := &mergeCopy{dst: dst, layers: layers, files: files, reader: NewPieceReader(layers)}
	groups := groupPieces(Overlay(layers), layers, oldest.Parent == oldest.Base)
	for _, g := range groups {
		if err := b.Add(g[0].Kind, g[0].Page, g[len(g)-1].End()-g[0].Page); err != nil {
			return LayerInfo{}, err
		}
	}
	for i, g := range groups {
		if g[0].Kind != RunData {
			continue
		}
		if err := c.copy(&b.Runs[i], g); err != nil {
			return LayerInfo{}, err
		}
	}
	if err := c.flush(); err != nil {
		return LayerInfo{}, err
	}
	return b.Finish(dst)
}

// smallRun is how many pages a run has at most that is read to be put together with its neighbours.
const smallRun = 16

// groupPieces says which pieces become one run. Each group is of one kind and of adjacent pages within one chunk of memory.
// A whole run stays one, unless it is short. With nothing but the base below, a piece that is as in the base is left out.
func groupPieces(pieces []Piece, layers []*Layer, onBase bool) [][]Piece {
	if onBase {
		pieces = slices.DeleteFunc(pieces, func(p Piece) bool { return p.Kind == RunBase })
	}
	var out [][]Piece
	first, loose := 0, false // of the group that is being filled
	for i, p := range pieces {
		whole := p.Kind == RunData && p.Pages > smallRun && p.Pages == uint64(layers[p.Layer].Runs[p.Run].Pages)
		if i > 0 {
			last := pieces[i-1]
			if loose && !whole && last.Kind == p.Kind && last.End() == p.Page && p.Page%chunkPages != 0 {
				continue
			}
			out = append(out, pieces[first:i])
		}
		first, loose = i, !whole
	}
	if len(pieces) > 0 {
		out = append(out, pieces[first:])
	}
	return out
}

// mergeCopy copies data. Whole runs that lie behind each other in one file and go behind each other are copied together.
type mergeCopy struct {
	dst    *os.File
	layers []*Layer
	files  []*os.File
	reader *PieceReader

	from     int // what is to be copied: n bytes of files[from]
	src, off int64
	n        int64
}

// copy writes a run that consists of pieces, and sets its checksum.
func (c *mergeCopy) copy(r *Run, pieces []Piece) error {
	p := pieces[0]
	old := c.layers[p.Layer].Runs[p.Run]
	if len(pieces) == 1 && old.Pages == r.Pages {
		r.Sum = old.Sum
		return c.whole(p.Layer, int64(old.Offset), int64(r.Offset), int64(r.Bytes()))
	}
	data := make([]byte, r.Bytes())
	rest := data
	for _, p := range pieces {
		n := p.Pages * PageSize
		if err := c.reader.Read(p, rest[:n]); err != nil {
			return err
		}
		rest = rest[n:]
	}
	r.Sum = Checksum(data)
	_, err := c.dst.WriteAt(data, int64(r.Offset))
	return err
}

func (c *mergeCopy) whole(from int, src, off, n int64) error {
	if c.n > 0 && c.from == from && c.src+c.n == src && c.off+c.n == off {
		c.n += n
		return nil
	}
	err := c.flush()
	c.from, c.src, c.off, c.n = from, src, off, n
	return err
}

// flush copies within the kernel, which shares extents where the file system can, and by reading and writing where it cannot.
func (c *mergeCopy) flush() error {
	for c.n > 0 {
		src, off := c.src, c.off
		n, err := unix.CopyFileRange(int(c.files[c.from].Fd()), &src, int(c.dst.Fd()), &off, int(min(c.n, 1<<30)), 0)
		if n <= 0 {
			if n, err = c.byHand(err); err != nil {
				return err
			}
		}
		c.src, c.off, c.n = c.src+int64(n), c.off+int64(n), c.n-int64(n)
	}
	return nil
}

// byHand copies what the kernel did not. why is its error, nil at the end of the file.
func (c *mergeCopy) byHand(why error) (int, error) {
	part := c.layers[c.from].label + ", data"
	if why == nil {
		return 0, badf(part, "the file is cut short")
	}
	if !errors.Is(why, unix.EXDEV) && !errors.Is(why, unix.ENOSYS) && !errors.Is(why, unix.EOPNOTSUPP) && !errors.Is(why, unix.EINVAL) {
		return 0, fmt.Errorf("%s: %w", part, os.NewSyscallError("copy_file_range", why))
	}
	b := make([]byte, min(c.n, ChunkBytes))
	if n, err := c.files[c.from].ReadAt(b, c.src); n < len(b) {
		return 0, badOrIO(part, err)
	}
	return c.dst.WriteAt(b, c.off)
}
