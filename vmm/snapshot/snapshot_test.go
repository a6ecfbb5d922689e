package snapshot_test

import (
	"bytes"
	"errors"
	"flag"
	"io"
	"math/rand/v2"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"

	"torpor/vmm/snapshot"
)

var update = flag.Bool("update", false, "write the golden files anew")

const memoryBytes = 3<<20 + 8192 // a last chunk that is short

func sample() *snapshot.State {
	block := func(n int, v byte) []byte { return bytes.Repeat([]byte{v}, n) }
	vcpu := func(v byte) snapshot.VCPU {
		return snapshot.VCPU{
			MPState: uint32(v), TSCKHz: 2_400_000, Regs: block(144, v), Sregs: block(312, v), XSave: block(64, v), XCRs: block(392, v),
			DebugRegs: block(128, v), LAPIC: block(1024, v), Events: block(64, v), CPUID: block(40, v),
			MSRs: []snapshot.MSR{{Index: 0x10, Data: 1 << 40}, {Index: 0x6e0, Data: uint64(v)}},
		}
	}
	return &snapshot.State{
		ID: snapshot.ID{1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16},
		Shape: snapshot.Shape{
			VCPUs: 2, MemoryBytes: memoryBytes, Console: true, VsockCID: 3,
			Disks: []snapshot.Disk{{ID: "root", Bytes: 4 << 30}, {ID: "tools", Bytes: 1 << 20, ReadOnly: true}},
		},
		CPU: snapshot.CPU{
			Vendor: "AuthenticAMD", XSaveBytes: 4096,
			Features: []snapshot.Features{{Leaf: 1, Register: snapshot.ECX, Bits: 0x80202001}, {Leaf: 7, Register: snapshot.EBX, Bits: 1 << 5}},
		},
		Memory: snapshot.Memory{Kind: snapshot.Diff, Sums: []uint32{1, 2, 3, 4}},
		Clock:  123_456_789, IRQChips: [][]byte{block(520, 1), block(520, 2), block(520, 3)},
		VCPUs:   []snapshot.VCPU{vcpu(0), vcpu(1)},
		Devices: []snapshot.Device{{Name: "virtio 0", Data: []byte("block")}, {Name: "serial", Data: []byte{0, 1}}},
	}
}

// golden compares with a checked-in file: what an older build wrote must be readable for ever, byte by byte.
func golden(t *testing.T, name string, got []byte) {
	t.Helper()
	path := filepath.Join("testdata", name)
	if *update {
		if err := os.WriteFile(path, got, 0o644); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(got, want) {
		t.Errorf("%s is not what this build writes: the format changed without a new version", name)
	}
}

// A template is the only part of a state that need not be there.
func TestTemplateRoundTrip(t *testing.T) {
	want := sample()
	want.CPU.Template = "x86-64-v3"
	got, err := snapshot.DecodeState(want.Encode())
	if err != nil || !reflect.DeepEqual(got, want) {
		t.Errorf("decoded %+v, %v", got, err)
	}
}

func TestStateRoundTripAndGolden(t *testing.T) {
	want := sample()
	raw := want.Encode()
	golden(t, "v1.state", raw)
	got, err := snapshot.DecodeState(raw)
	if err != nil {
		t.Fatal(err)
	}
	if !reflect.DeepEqual(got, want) {
		t.Errorf("decoded %+v", got)
	}
}

// Every single flipped bit is found, and the error is typed.
func TestAnyFlippedBitInAStateIsFound(t *testing.T) {
	raw := sample().Encode()
	for i := range raw {
		bad := bytes.Clone(raw)
		bad[i] ^= 1 << (i % 8)
		_, err := snapshot.DecodeState(bad)
		var typed *snapshot.Error
		if !errors.As(err, &typed) || typed.Part == "" {
			t.Fatalf("byte %d: %v", i, err)
		}
	}
	for n := range raw {
		if _, err := snapshot.DecodeState(raw[:n]); err == nil {
			t.Fatalf("accepted the first %d bytes", n)
		}
	}
}

func TestStateOfAnotherVersionIsRefusedByName(t *testing.T) {
	raw := sample().Encode()
	raw[8] = 2
	if _, err := snapshot.DecodeState(raw); !errors.Is(err, snapshot.ErrVersion) || !strings.Contains(err.Error(), "2") {
		t.Errorf("%v", err)
	}
}

func TestShapeDifferenceNamesIt(t *testing.T) {
	for word, change := range map[string]func(*snapshot.Shape){
		"vCPUs": func(s *snapshot.Shape) { s.VCPUs++ }, "memory": func(s *snapshot.Shape) { s.MemoryBytes += 4096 },
		"console": func(s *snapshot.Shape) { s.Console = false }, "vsock": func(s *snapshot.Shape) { s.VsockCID = 4 },
		"disks": func(s *snapshot.Shape) { s.Disks = s.Disks[:1] }, "disk 0": func(s *snapshot.Shape) { s.Disks[0].Bytes++ },
	} {
		a, b := sample().Shape, sample().Shape
		if change(&b); !strings.Contains(a.Difference(b), word) {
			t.Errorf("%s: %q", word, a.Difference(b))
		}
	}
	if d := sample().Shape.Difference(sample().Shape); d != "" {
		t.Error(d)
	}
}

func TestMissingFeaturesAreNamed(t *testing.T) {
	saved := snapshot.CPU{Vendor: "GenuineIntel", XSaveBytes: 8192, Features: []snapshot.Features{
		{Leaf: 7, Register: snapshot.EBX, Bits: 1<<16 | 1<<5 | 1<<0},
		{Leaf: 1, Register: snapshot.ECX, Bits: 1 << 28},
		{Leaf: 0x80000008, Register: snapshot.EBX, Bits: 1 << 12},
	}}
	host := snapshot.CPU{Vendor: "GenuineIntel", XSaveBytes: 8192, Features: []snapshot.Features{
		{Leaf: 7, Register: snapshot.EBX, Bits: 1 << 0}, {Leaf: 1, Register: snapshot.ECX, Bits: 1<<28 | 1<<25},
	}}
	if got := strings.Join(saved.Missing(host), " "); got != "avx2 avx512f CPUID.80000008H.0:EBX[12]" {
		t.Errorf("missing %q", got)
	}
	if got := saved.Missing(saved); got != nil {
		t.Errorf("missing from itself: %v", got)
	}
	if got := saved.Within(host); got.Missing(host) != nil || got.Features[0].Bits != 1 || saved.Features[0].Bits == 1 {
		t.Errorf("within: %v, of %v", got.Features, saved.Features)
	}
	host.Vendor, host.XSaveBytes = "AuthenticAMD", 4096
	if got := saved.Missing(host); len(got) != 5 {
		t.Errorf("missing %v", got)
	}
}

// file is an in-memory io.WriterAt and io.ReaderAt.
type file struct{ b []byte }

func (f *file) WriteAt(p []byte, off int64) (int, error) {
	if end := int(off) + len(p); end > len(f.b) {
		f.b = append(f.b, make([]byte, end-len(f.b))...)
	}
	return copy(f.b[off:], p), nil
}

func (f *file) ReadAt(p []byte, off int64) (int, error) { return bytes.NewReader(f.b).ReadAt(p, off) }

func sampleDiff(t testing.TB) *file {
	t.Helper()
	f := &file{}
	w := snapshot.NewDiffWriter(f, sample().ID, memoryBytes)
	page := func(n int, v byte) []byte { return bytes.Repeat([]byte{v}, n*snapshot.PageSize) }
	for _, step := range []error{
		w.Data(1, page(2, 0xaa)), w.Zero(5, 3), w.Data(8, page(1, 0xbb)), w.Data(400, page(300, 0xcc)), w.Zero(769, 1),
	} {
		if step != nil {
			t.Fatal(step)
		}
	}
	info, err := w.Finish()
	if err != nil || info.DataPages != 303 || info.ZeroPages != 4 {
		t.Fatalf("%+v %v", info, err)
	}
	return f
}

func TestDiffRoundTripAndGolden(t *testing.T) {
	f := sampleDiff(t)
	golden(t, "v1.diff.head", f.b[:3*snapshot.PageSize])
	golden(t, "v1.diff.table", f.b[snapshot.PageSize*304:])
	d, err := snapshot.OpenDiff(f)
	if err != nil {
		t.Fatal(err)
	}
	if err := d.Verify(); err != nil {
		t.Fatal(err)
	}
	if err := sample().Owns(d.Info); err != nil {
		t.Error(err)
	}
	other := sample()
	other.ID[0]++
	if err := other.Owns(d.Info); !errors.Is(err, snapshot.ErrMismatch) {
		t.Errorf("a state took another's diff: %v", err)
	}
	var pages []uint64
	for _, r := range d.Runs {
		pages = append(pages, r.Page)
	}
	if want := []uint64{1, 5, 8, 400, 656, 769}; !reflect.DeepEqual(pages, want) {
		t.Errorf("runs at %v, want %v", pages, want)
	}
	b := make([]byte, d.Runs[2].Bytes())
	if err := d.ReadRun(d.Runs[2], b); err != nil || b[0] != 0xbb {
		t.Errorf("%#x %v", b[0], err)
	}
}

func TestAnyFlippedBitInADiffIsFound(t *testing.T) {
	f := sampleDiff(t)
	check := func() error {
		d, err := snapshot.OpenDiff(f)
		if err != nil {
			return err
		}
		return d.Verify()
	}
	var step int
	for i := 0; i < len(f.b); i += step {
		if step = 1; i > 100 && i < len(f.b)-300 {
			step = 977 // page data: a sample will do
		}
		if i >= 64 && i < snapshot.PageSize {
			continue // padding between header and data
		}
		f.b[i] ^= 1 << (i % 8)
		err := check()
		f.b[i] ^= 1 << (i % 8)
		if !errors.As(err, new(*snapshot.Error)) {
			t.Fatalf("byte %d of %d: %v", i, len(f.b), err)
		}
	}
	if err := check(); err != nil {
		t.Fatal(err)
	}
	for _, n := range []int{0, 63, 64, 4096, 8192, len(f.b) - 1} {
		short := &file{f.b[:n]}
		if _, err := snapshot.OpenDiff(short); !errors.As(err, new(*snapshot.Error)) {
			t.Errorf("accepted the first %d bytes: %v", n, err)
		}
	}
}

func TestDiffWriterRefusesDisorder(t *testing.T) {
	page := make([]byte, snapshot.PageSize)
	for name, f := range map[string]func(*snapshot.DiffWriter) error{
		"backwards":    func(w *snapshot.DiffWriter) error { return errors.Join(w.Data(5, page), w.Data(4, page)) },
		"twice":        func(w *snapshot.DiffWriter) error { return errors.Join(w.Data(5, page), w.Zero(5, 1)) },
		"beyond":       func(w *snapshot.DiffWriter) error { return w.Data(memoryBytes/snapshot.PageSize, page) },
		"part of page": func(w *snapshot.DiffWriter) error { return w.Data(5, page[:100]) },
		"nothing":      func(w *snapshot.DiffWriter) error { return w.Zero(5, 0) },
		"too many":     func(w *snapshot.DiffWriter) error { return w.Zero(5, 257) },
	} {
		if f(snapshot.NewDiffWriter(&file{}, snapshot.ID{}, memoryBytes)) == nil {
			t.Errorf("%s was accepted", name)
		}
	}
}

// The written bytes stay near the pages they carry, however short the runs are.
func TestDiffIsNotMuchLargerThanItsPages(t *testing.T) {
	const pages = 100_000
	f := &file{b: make([]byte, 0, 64<<20)}
	w := snapshot.NewDiffWriter(f, snapshot.ID{}, pages*snapshot.PageSize)
	rng := rand.New(rand.NewPCG(5, 6))
	page := make([]byte, snapshot.PageSize)
	for p := uint64(0); p < pages; p += 1 + rng.Uint64N(20) {
		if err := w.Data(p, page); err != nil {
			t.Fatal(err)
		}
	}
	info, err := w.Finish()
	if err != nil {
		t.Fatal(err)
	}
	if over := float64(len(f.b)) / float64(info.DataPages*snapshot.PageSize); over > 1.02 {
		t.Errorf("the file is %.3f times its pages", over)
	}
}

func TestVerifyFlat(t *testing.T) {
	image := make([]byte, memoryBytes)
	rand.NewChaCha8([32]byte{}).Read(image[:2<<20])
	var sums []uint32
	for off := 0; off < len(image); off += snapshot.ChunkBytes {
		sums = append(sums, snapshot.Checksum(image[off:min(off+snapshot.ChunkBytes, len(image))]))
	}
	if sums[2] != snapshot.ZeroSum(snapshot.ChunkBytes) || sums[3] != snapshot.ZeroSum(8192) {
		t.Error("the checksum of zeros is wrong")
	}
	if err := snapshot.VerifyFlat(bytes.NewReader(image), memoryBytes, sums); err != nil {
		t.Fatal(err)
	}
	for _, i := range []int{0, 1<<20 - 1, 1 << 20, memoryBytes - 1} {
		image[i] ^= 4
		if err := snapshot.VerifyFlat(bytes.NewReader(image), memoryBytes, sums); !errors.Is(err, snapshot.ErrChecksum) {
			t.Errorf("byte %d: %v", i, err)
		}
		image[i] ^= 4
	}
	if err := snapshot.VerifyFlat(bytes.NewReader(image[:len(image)-1]), memoryBytes, sums); !errors.Is(err, snapshot.ErrFormat) {
		t.Errorf("short image: %v", err)
	}
}

func FuzzState(f *testing.F) {
	f.Add(sample().Encode())
	small := sample()
	small.Shape.Disks, small.CPU.Features, small.Devices, small.IRQChips = nil, nil, nil, nil
	f.Add(small.Encode())
	f.Fuzz(func(t *testing.T, raw []byte) {
		s, err := snapshot.DecodeState(raw)
		if err != nil {
			if !errors.As(err, new(*snapshot.Error)) {
				t.Errorf("untyped: %v", err)
			}
			return
		}
		if !bytes.Equal(s.Encode(), raw) {
			t.Error("decodes, but encodes to other bytes")
		}
	})
}

func FuzzDiff(f *testing.F) {
	f.Add(sampleDiff(f).b)
	empty := &file{}
	if _, err := snapshot.NewDiffWriter(empty, snapshot.ID{}, memoryBytes).Finish(); err != nil {
		f.Fatal(err)
	}
	f.Add(empty.b)
	f.Fuzz(func(t *testing.T, raw []byte) {
		d, err := snapshot.OpenDiff(&file{raw})
		if err == nil {
			err = d.Verify()
			last := uint64(0)
			for _, r := range d.Runs {
				if r.Page < last || r.End() > d.Info.MemoryBytes/snapshot.PageSize {
					t.Errorf("run %+v", r)
				}
				last = r.End()
			}
		}
		if err != nil && !errors.As(err, new(*snapshot.Error)) && !errors.Is(err, io.EOF) {
			t.Errorf("untyped: %v", err)
		}
	})
}
