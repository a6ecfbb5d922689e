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
		Host:   snapshot.Host{Kernel: "6.1.0-18-amd64", KVM: "kvm_amd"},
		Memory: snapshot.Memory{Kind: snapshot.Diff, Sums: []uint32{1, 2, 3, 4}, Top: snapshot.Digest{9}},
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
	golden(t, "v2.state", raw)
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
	raw[8] = 3
	if _, err := snapshot.DecodeState(raw); !errors.Is(err, snapshot.ErrVersion) || !strings.Contains(err.Error(), "3") {
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

var sampleBase = sample().Base()

// run is what a test puts into a layer. value is of every byte, if it is data.
type run struct {
	kind        snapshot.RunKind
	page, pages uint64
	value       byte
}

// build writes a layer.
func build(t testing.TB, f io.WriterAt, info snapshot.LayerInfo, runs ...run) snapshot.LayerInfo {
	t.Helper()
	b := snapshot.NewLayerBuilder(info)
	var values []byte
	for _, r := range runs {
		if err := b.Add(r.kind, r.page, r.pages); err != nil {
			t.Fatal(err)
		}
		for len(values) < len(b.Runs) {
			values = append(values, r.value)
		}
	}
	for i := range b.Runs {
		if r := &b.Runs[i]; r.Kind == snapshot.RunData {
			data := bytes.Repeat(values[i:i+1], r.Bytes())
			r.Sum = snapshot.Checksum(data)
			if _, err := f.WriteAt(data, int64(r.Offset)); err != nil {
				t.Fatal(err)
			}
		}
	}
	out, err := b.Finish(f)
	if err != nil {
		t.Fatal(err)
	}
	return out
}

// sampleLayer is the one of the golden files.
func sampleLayer(t testing.TB) (*file, snapshot.LayerInfo) {
	t.Helper()
	f := &file{}
	info := build(
		t, f, snapshot.LayerInfo{ID: sample().ID, MemoryBytes: memoryBytes, Base: sampleBase, Parent: snapshot.Digest{7}, Replaces: snapshot.Digest{8}},
		run{snapshot.RunData, 1, 2, 0xaa}, run{snapshot.RunZero, 5, 3, 0}, run{snapshot.RunData, 8, 1, 0xbb}, run{snapshot.RunBase, 100, 4, 0},
		run{snapshot.RunData, 400, 300, 0xcc}, run{snapshot.RunZero, 769, 1, 0},
	)
	if info.DataPages != 303 || info.ZeroPages != 4 || info.BasePages != 4 || info.FileBytes != uint64(len(f.b)) {
		t.Fatalf("%+v", info)
	}
	return f, info
}

func open(t testing.TB, f io.ReaderAt) *snapshot.Layer {
	t.Helper()
	l, err := snapshot.OpenLayer(f, "the layer")
	if err != nil {
		t.Fatal(err)
	}
	return l
}

func TestLayerRoundTripAndGolden(t *testing.T) {
	f, info := sampleLayer(t)
	golden(t, "v2.layer.head", f.b[:3*snapshot.PageSize])
	golden(t, "v2.layer.table", f.b[snapshot.PageSize*304:])
	l := open(t, f)
	if err := l.Verify(); err != nil {
		t.Fatal(err)
	}
	if l.Info != info || info.Name() != info.Replaces {
		t.Errorf("written %+v\nread    %+v", info, l.Info)
	}
	var pages []uint64
	for _, r := range l.Runs {
		pages = append(pages, r.Page)
	}
	if want := []uint64{1, 5, 8, 100, 400, 512, 769}; !reflect.DeepEqual(pages, want) {
		t.Errorf("runs at %v, want %v", pages, want)
	}
	b := make([]byte, l.Runs[2].Bytes())
	if err := l.ReadRun(l.Runs[2], b); err != nil || b[0] != 0xbb {
		t.Errorf("%#x %v", b[0], err)
	}
}

// goldenV1 puts the golden layer of version 1 together, of which the data is left out.
func goldenV1(t testing.TB) *file {
	t.Helper()
	f := &file{}
	for _, part := range []struct {
		name string
		page int64
	}{{"v1.diff.head", 0}, {"v1.diff.table", 304}} {
		b, err := os.ReadFile(filepath.Join("testdata", part.name))
		if err != nil {
			t.Fatal(err)
		}
		if _, err := f.WriteAt(b, part.page*snapshot.PageSize); err != nil {
			t.Fatal(err)
		}
	}
	for page := 3; page < 304; page++ {
		value := byte(0xcc)
		if page == 3 {
			value = 0xbb
		}
		copy(f.b[page*snapshot.PageSize:], bytes.Repeat([]byte{value}, snapshot.PageSize))
	}
	return f
}

func TestVersion1IsRead(t *testing.T) {
	raw, err := os.ReadFile(filepath.Join("testdata", "v1.state"))
	if err != nil {
		t.Fatal(err)
	}
	want := sample()
	want.Host, want.Memory.Top = snapshot.Host{}, snapshot.Digest{}
	state, err := snapshot.DecodeState(raw)
	if err != nil || !reflect.DeepEqual(state, want) {
		t.Fatalf("decoded %+v, %v", state, err)
	}
	l := open(t, goldenV1(t))
	if err := errors.Join(l.Verify(), state.Owns([]*snapshot.Layer{l})); err != nil {
		t.Error(err)
	}
	if l.Info.Version != 1 || l.Info.DataPages != 303 || l.Info.Name() != l.Info.Digest {
		t.Errorf("%+v", l.Info)
	}
	state.ID[0]++
	if err := state.Owns([]*snapshot.Layer{l}); !errors.Is(err, snapshot.ErrMismatch) {
		t.Errorf("a state took another's layer: %v", err)
	}
}

func TestAnyFlippedBitInALayerIsFound(t *testing.T) {
	f, _ := sampleLayer(t)
	check := func() error {
		d, err := snapshot.OpenLayer(f, "the layer")
		if err != nil {
			return err
		}
		return d.Verify()
	}
	var step int
	for i := 0; i < len(f.b); i += step {
		if step = 1; i > snapshot.PageSize+100 && i < len(f.b)-300 {
			step = 977 // page data: a sample will do
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
	for _, n := range []int{0, 63, 64, 191, 192, 4096, 8192, len(f.b) - 1} {
		short := &file{f.b[:n]}
		if _, err := snapshot.OpenLayer(short, "the layer"); !errors.As(err, new(*snapshot.Error)) {
			t.Errorf("accepted the first %d bytes: %v", n, err)
		}
	}
}

func TestLayerBuilderRefusesDisorder(t *testing.T) {
	for name, runs := range map[string][]run{
		"backwards": {{snapshot.RunData, 5, 1, 0}, {snapshot.RunData, 4, 1, 0}},
		"twice":     {{snapshot.RunData, 5, 1, 0}, {snapshot.RunZero, 5, 1, 0}},
		"beyond":    {{snapshot.RunData, memoryBytes / snapshot.PageSize, 1, 0}},
		"overflow":  {{snapshot.RunZero, 5, 1<<64 - 2, 0}},
		"nothing":   {{snapshot.RunZero, 5, 0, 0}},
	} {
		b := snapshot.NewLayerBuilder(snapshot.LayerInfo{MemoryBytes: memoryBytes})
		var err error
		for _, r := range runs {
			err = b.Add(r.kind, r.page, r.pages)
		}
		if err == nil {
			t.Errorf("%s was accepted", name)
		}
	}
}

// The written bytes stay near the pages they carry, however short the runs are.
func TestLayerIsNotMuchLargerThanItsPages(t *testing.T) {
	const pages = 100_000
	b := snapshot.NewLayerBuilder(snapshot.LayerInfo{MemoryBytes: pages * snapshot.PageSize})
	rng := rand.New(rand.NewPCG(5, 6))
	stored := uint64(0)
	for p := uint64(0); p < pages; p += 1 + rng.Uint64N(20) {
		if err := b.Add(snapshot.RunData, p, 1); err != nil {
			t.Fatal(err)
		}
		stored++
	}
	if over := float64(b.FileBytes()) / float64(stored*snapshot.PageSize); over > 1.02 {
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
	if old, err := os.ReadFile(filepath.Join("testdata", "v1.state")); err == nil {
		f.Add(old)
	}
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
		if raw[8] == snapshot.StateVersion && !bytes.Equal(s.Encode(), raw) {
			t.Error("decodes, but encodes to other bytes")
		}
	})
}

func FuzzLayer(f *testing.F) {
	layer, _ := sampleLayer(f)
	f.Add(layer.b)
	f.Add(goldenV1(f).b)
	empty := &file{}
	build(f, empty, snapshot.LayerInfo{MemoryBytes: memoryBytes, Base: snapshot.Digest{1}, Parent: snapshot.Digest{1}})
	f.Add(empty.b)
	f.Fuzz(func(t *testing.T, raw []byte) {
		d, err := snapshot.OpenLayer(&file{raw}, "the layer")
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
