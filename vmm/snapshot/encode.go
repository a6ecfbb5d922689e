package snapshot

import (
	"fmt"
	"hash/crc32"
	"os"
)

const (
	stateMagic       = "TORPORST"
	stateHeaderBytes = 48
	sectionBytes     = 24
	// maxStateBytes bounds what a reader believes: a real state is a few hundred KiB.
	maxStateBytes = 256 << 20
)

// Section kinds, in the order they appear in a file.
const (
	sectionShape   = 1
	sectionCPU     = 2
	sectionMemory  = 3
	sectionVM      = 4
	sectionVCPU    = 5 // one per vCPU, instance = its index
	sectionDevices = 6
	sectionHost    = 7 // since version 2
)

var sectionNames = map[uint32]string{
	sectionShape: "shape", sectionCPU: "cpu", sectionMemory: "memory", sectionVM: "vm", sectionVCPU: "vcpu", sectionDevices: "devices",
	sectionHost: "host",
}

// Encode returns the state as a file's bytes.
func (s *State) Encode() []byte {
	var body encoder
	sections := uint32(0)
	add := func(kind, instance uint32, payload encoder) {
		var header encoder
		header.u32(kind)
		header.u32(instance)
		header.u64(uint64(len(payload)))
		body = append(body, header...)
		body.u32(Checksum(append(header, payload...)))
		body.u32(0)
		body = append(body, payload...)
		sections++
	}
	add(sectionShape, 0, s.Shape.encode())
	add(sectionCPU, 0, s.CPU.encode())
	add(sectionMemory, 0, s.Memory.encode())
	add(sectionVM, 0, s.encodeVM())
	for i := range s.VCPUs {
		add(sectionVCPU, uint32(i), s.VCPUs[i].encode())
	}
	add(sectionDevices, 0, s.encodeDevices())
	add(sectionHost, 0, s.Host.encode())

	header := encoder(stateMagic)
	header.u32(StateVersion)
	header.u32(sections)
	header.u64(uint64(stateHeaderBytes + len(body)))
	header = append(header, s.ID[:]...)
	header.u32(0)
	header.u32(Checksum(header))
	return append(header, body...)
}

// DecodeState is the inverse of Encode. Every checksum is verified; an error is an *Error that names the part. The result
// aliases b.
func DecodeState(b []byte) (*State, error) {
	const part = "state header"
	if len(b) < stateHeaderBytes || string(b[:8]) != stateMagic {
		return nil, badf(part, "this is not a state file")
	}
	version := le.Uint32(b[8:])
	if version < 1 || version > StateVersion {
		return nil, bad(part, fmt.Errorf("%w %d (this Torpor reads versions up to %d)", ErrVersion, version, StateVersion))
	}
	if Checksum(b[:44]) != le.Uint32(b[44:]) {
		return nil, bad(part, ErrChecksum)
	}
	if n := le.Uint64(b[16:]); n != uint64(len(b)) || le.Uint32(b[40:]) != 0 {
		return nil, badf(part, "the file is %d bytes, should be %d", len(b), n)
	}
	s := &State{ID: ID(b[24:40])}
	rest := b[stateHeaderBytes:]
	last := uint64(0)
	for range le.Uint32(b[12:]) {
		order, err := s.decodeSection(&rest, last, version)
		if err != nil {
			return nil, err
		}
		last = order
	}
	if hasHost := last>>32 == sectionHost; hasHost != (version > 1) {
		return nil, badf("state", "section host in a file of version %d: %t", version, hasHost)
	}
	if len(rest) != 0 {
		return nil, badf(part, "%d bytes after the last section", len(rest))
	}
	return s, s.validate()
}

// decodeSection reads one section off rest. Sections ascend by kind and instance; last is the order of the one before.
func (s *State) decodeSection(rest *[]byte, last uint64, version uint32) (order uint64, err error) {
	b := *rest
	if len(b) < sectionBytes {
		return 0, badf("state", "a section header is cut short")
	}
	kind, instance, n, sum, zero := le.Uint32(b), le.Uint32(b[4:]), le.Uint64(b[8:]), le.Uint32(b[16:]), le.Uint32(b[20:])
	name, known := sectionNames[kind]
	part := fmt.Sprintf("state, section %s %d", name, instance)
	order = uint64(kind)<<32 | uint64(instance)
	switch {
	case !known:
		return 0, badf("state", "unknown section %d", kind)
	case n > uint64(len(b)-sectionBytes) || zero != 0:
		return 0, badf(part, "%d bytes are claimed, %d left", n, len(b)-sectionBytes)
	case order <= last:
		return 0, badf(part, "out of order")
	}
	payload := b[sectionBytes : sectionBytes+n]
	*rest = b[sectionBytes+n:]
	if crc32.Update(Checksum(b[:16]), castagnoli, payload) != sum {
		return 0, bad(part, ErrChecksum)
	}
	d := &decoder{b: payload}
	switch kind {
	case sectionShape:
		s.Shape.decode(d)
	case sectionCPU:
		s.CPU.decode(d)
	case sectionMemory:
		s.Memory.decode(d, version)
	case sectionVM:
		s.decodeVM(d)
	case sectionVCPU:
		var v VCPU
		v.decode(d)
		if instance != uint32(len(s.VCPUs)) {
			return 0, badf(part, "the vCPU before it is missing")
		}
		s.VCPUs = append(s.VCPUs, v)
	case sectionDevices:
		s.decodeDevices(d)
	case sectionHost:
		s.Host.decode(d)
	}
	if !d.done() {
		return 0, badf(part, "its contents do not fill it exactly")
	}
	return order, nil
}

// validate checks what the sections say of each other.
func (s *State) validate() error {
	switch {
	case s.Shape.VCPUs == 0 || uint32(len(s.VCPUs)) != s.Shape.VCPUs:
		return badf("state", "%d vCPU sections for %d vCPUs", len(s.VCPUs), s.Shape.VCPUs)
	case s.Memory.Kind != Full && s.Memory.Kind != Diff:
		return badf("state, section memory 0", "memory %v", s.Memory.Kind)
	case s.Memory.Kind == Full && !s.Memory.Top.IsZero():
		return badf("state, section memory 0", "a layer over a full memory")
	case s.Shape.MemoryBytes%PageSize != 0 || uint64(len(s.Memory.Sums)) != chunks(s.Shape.MemoryBytes):
		return badf("state, section memory 0", "%d checksums for %d bytes", len(s.Memory.Sums), s.Shape.MemoryBytes)
	}
	return nil
}

func chunks(bytes uint64) uint64 {
	n := bytes / ChunkBytes
	if bytes%ChunkBytes != 0 {
		n++
	}
	return n
}

// ReadState reads and verifies the state file at path.
func ReadState(path string) (*State, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, fmt.Errorf("read state: %w", err)
	}
	defer func() { _ = f.Close() }() // it was only read
	return ReadStateFile(f)
}

// ReadStateFile reads and verifies an open state file, which stays the caller's.
func ReadStateFile(f *os.File) (*State, error) {
	info, err := f.Stat()
	if err != nil {
		return nil, fmt.Errorf("read state: %w", err)
	}
	if info.Size() > maxStateBytes {
		return nil, badf("state header", "the file is %d bytes, at most %d are possible", info.Size(), maxStateBytes)
	}
	b := make([]byte, info.Size())
	if n, err := f.ReadAt(b, 0); n < len(b) {
		return nil, fmt.Errorf("read state: %w", err)
	}
	return DecodeState(b)
}
