package acpi_test

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"testing"

	"torpor/vmm/acpi"
)

func config(cpus, devices int, uart bool) acpi.Config {
	c := acpi.Config{
		Addr: 0xe0000, CPUs: cpus, LAPIC: 0xfee00000, IOAPIC: 0xfec00000,
		SleepCtl: 0x600, SleepSts: 0x601, Reset: 0x64, ResetVal: 0xfe,
	}
	for i := range devices {
		c.Virtio = append(c.Virtio, acpi.VirtioMMIO{Base: 0xc0000000 + uint32(i)*0x1000, GSI: uint32(5 + i)})
	}
	if uart {
		c.UART = &acpi.UART{Port: 0x3f8, GSI: 4}
	}
	return c
}

// find follows RSDP and XSDT as an operating system does and returns the tables by signature, DSDT included.
func find(t *testing.T, base uint64, area []byte) map[string][]byte {
	t.Helper()
	if string(area[:8]) != "RSD PTR " || sum(area[:20]) != 0 || sum(area[:36]) != 0 || area[15] != 2 {
		t.Fatalf("bad RSDP % x", area[:36])
	}
	at := func(addr uint64) []byte {
		if addr < base || addr+36 > base+uint64(len(area)) || addr%16 != 0 {
			t.Fatalf("table at %#x is outside the area or unaligned", addr)
		}
		b := area[addr-base:]
		n := binary.LittleEndian.Uint32(b[4:])
		if int(n) > len(b) {
			t.Fatalf("table %q is %d bytes, %d left", b[:4], n, len(b))
		}
		if sum(b[:n]) != 0 {
			t.Fatalf("table %q: checksum", b[:4])
		}
		return b[:n]
	}
	xsdt := at(binary.LittleEndian.Uint64(area[24:]))
	if string(xsdt[:4]) != "XSDT" {
		t.Fatalf("XSDT is %q", xsdt[:4])
	}
	tables := map[string][]byte{}
	for e := xsdt[36:]; len(e) > 0; e = e[8:] {
		b := at(binary.LittleEndian.Uint64(e))
		tables[string(b[:4])] = b
	}
	fadt := tables["FACP"]
	if fadt == nil {
		t.Fatal("no FADT")
	}
	dsdt := at(binary.LittleEndian.Uint64(fadt[140:]))
	tables[string(dsdt[:4])] = dsdt
	return tables
}

func sum(b []byte) (s uint8) {
	for _, v := range b {
		s += v
	}
	return s
}

func TestFADTDescribesAReducedMachineWithoutClockOrKeyboard(t *testing.T) {
	c := config(2, 3, true)
	fadt := find(t, c.Addr, acpi.Build(c))["FACP"]
	if len(fadt) != 276 || fadt[8] != 6 {
		t.Fatalf("FADT is %d bytes, revision %d", len(fadt), fadt[8])
	}
	if arch := binary.LittleEndian.Uint16(fadt[109:]); arch != 0x3c {
		t.Errorf("boot architecture %#x, want 0x3c", arch)
	}
	if flags := binary.LittleEndian.Uint32(fadt[112:]); flags != 0x100430 {
		t.Errorf("flags %#x", flags)
	}
	for _, r := range []struct {
		name string
		off  int
		port uint64
	}{{"reset", 116, 0x64}, {"sleep control", 244, 0x600}, {"sleep status", 256, 0x601}} {
		if gas := fadt[r.off:]; gas[0] != 1 || gas[1] != 8 || binary.LittleEndian.Uint64(gas[4:]) != r.port {
			t.Errorf("%s register is % x", r.name, gas[:12])
		}
	}
}

func TestMADTListsEveryCPU(t *testing.T) {
	for cpus := 1; cpus <= 8; cpus++ {
		c := config(cpus, 0, false)
		madt := find(t, c.Addr, acpi.Build(c))["APIC"]
		var apicIDs []byte
		ioapics := 0
		for e := madt[44:]; len(e) > 0; e = e[e[1]:] {
			switch e[0] {
			case 0:
				if e[4]&1 == 0 {
					t.Error("a CPU is not enabled")
				}
				apicIDs = append(apicIDs, e[3])
			case 1:
				ioapics++
				if addr := binary.LittleEndian.Uint32(e[4:]); addr != 0xfec00000 {
					t.Errorf("I/O APIC at %#x", addr)
				}
			}
		}
		if want := []byte{0, 1, 2, 3, 4, 5, 6, 7}[:cpus]; !bytes.Equal(apicIDs, want) || ioapics != 1 {
			t.Errorf("%d CPUs: APIC ids %v, %d I/O APICs", cpus, apicIDs, ioapics)
		}
	}
}

// aml is a reader of the little AML the DSDT uses, written from the grammar and not from the encoder.
type aml struct {
	t       *testing.T
	devices map[string]map[string][]byte // device -> name -> raw value
	s5      []byte
}

func pkgLength(b []byte) (total, used int) {
	more := int(b[0] >> 6)
	if more == 0 {
		return int(b[0] & 0x3f), 1
	}
	total = int(b[0] & 0xf)
	for i := range more {
		total |= int(b[1+i]) << (4 + 8*i)
	}
	return total, 1 + more
}

// value returns the raw bytes of the data object at the start of b.
func (a *aml) value(b []byte) []byte {
	switch b[0] {
	case 0x00, 0x01:
		return b[:1]
	case 0x0a:
		return b[:2]
	case 0x0b:
		return b[:3]
	case 0x0c:
		return b[:5]
	case 0x0d:
		return b[:bytes.IndexByte(b, 0)+1]
	case 0x11, 0x12:
		n, _ := pkgLength(b[1:])
		return b[:1+n]
	}
	a.t.Fatalf("unexpected AML object %#x", b[0])
	return nil
}

func (a *aml) walk(b []byte, device string) {
	for len(b) > 0 {
		switch {
		case b[0] == 0x10:
			n, used := pkgLength(b[1:])
			a.walk(b[1+used+4:1+n], device)
			b = b[1+n:]
		case b[0] == 0x5b && b[1] == 0x82:
			n, used := pkgLength(b[2:])
			name := string(b[2+used : 2+used+4])
			a.devices[name] = map[string][]byte{}
			a.walk(b[2+used+4:2+n], name)
			b = b[2+n:]
		case b[0] == 0x08:
			name := string(b[1:5])
			v := a.value(b[5:])
			if device == "" {
				a.s5 = v
			} else {
				a.devices[device][name] = v
			}
			b = b[5+len(v):]
		default:
			a.t.Fatalf("unexpected AML op %#x", b[0])
		}
	}
}

func TestDSDTHasOneNodePerDevice(t *testing.T) {
	for _, devices := range []int{0, 1, 3, 19} {
		c := config(1, devices, true)
		a := aml{t: t, devices: map[string]map[string][]byte{}}
		a.walk(find(t, c.Addr, acpi.Build(c))["DSDT"][36:], "")
		if len(a.devices) != devices+1 {
			t.Fatalf("%d devices in the name space, want %d", len(a.devices), devices+1)
		}
		for i, d := range c.Virtio {
			n := a.devices[fmt.Sprintf("VR%02X", i)]
			if string(n["_HID"]) != "\x0dLNRO0005\x00" {
				t.Errorf("_HID % x", n["_HID"])
			}
			crs := n["_CRS"][1:]
			_, used := pkgLength(crs)
			crs = crs[used+2:] // the length is a byte constant
			if crs[0] != 0x86 || binary.LittleEndian.Uint32(crs[4:]) != d.Base || binary.LittleEndian.Uint32(crs[8:]) != 0x1000 {
				t.Errorf("memory descriptor % x", crs)
			}
			if irq := crs[12:]; irq[0] != 0x89 || irq[3] != 3 || irq[4] != 1 || binary.LittleEndian.Uint32(irq[5:]) != d.GSI {
				t.Errorf("interrupt descriptor % x", irq)
			}
			if end := crs[21:]; !bytes.Equal(end, []byte{0x79, 0}) {
				t.Errorf("end tag % x", end)
			}
		}
		if string(a.devices["COM1"]["_HID"]) != "\x0c\x41\xd0\x05\x01" {
			t.Errorf("UART _HID % x", a.devices["COM1"]["_HID"])
		}
		if !bytes.Equal(a.s5, []byte{0x12, 6, 2, 0x0a, 5, 0x0a, 5}) {
			t.Errorf("_S5_ % x", a.s5)
		}
	}
}

func TestNoUARTWithoutConsole(t *testing.T) {
	c := config(1, 1, false)
	if dsdt := find(t, c.Addr, acpi.Build(c))["DSDT"]; bytes.Contains(dsdt, []byte("COM1")) {
		t.Error("a UART is described")
	}
}

func TestTablesFitBelowOneMiB(t *testing.T) {
	if n := len(acpi.Build(config(8, 19, true))); n > 0x20000 {
		t.Errorf("tables take %d bytes", n)
	}
}

// iasl is the reference compiler of the ACPI component architecture: what it cannot disassemble without a complaint, and compile
// again to the same bytes, is wrong.
func TestIASLReadsTheTables(t *testing.T) {
	iasl, err := exec.LookPath("iasl")
	if err != nil {
		t.Skip("needs iasl (apt install acpica-tools, or make deps)")
	}
	for name, c := range map[string]acpi.Config{
		"one CPU, no device": config(1, 0, false), "with a console": config(2, 3, true), "all there can be": config(8, 19, true),
	} {
		area := acpi.Build(c)
		tables := find(t, c.Addr, area)
		xsdt := area[binary.LittleEndian.Uint64(area[24:])-c.Addr:]
		tables["XSDT"] = xsdt[:binary.LittleEndian.Uint32(xsdt[4:])]
		for signature, table := range tables {
			readByIASL(t, iasl, name, signature, table)
		}
	}
}

func readByIASL(t *testing.T, iasl, name, signature string, table []byte) {
	t.Helper()
	dir := t.TempDir()
	aml, dsl := filepath.Join(dir, signature+".aml"), filepath.Join(dir, signature+".dsl")
	if err := os.WriteFile(aml, table, 0o600); err != nil {
		t.Fatal(err)
	}
	out, err := exec.Command(iasl, "-d", aml).CombinedOutput()
	text, rerr := os.ReadFile(dsl)
	if err != nil || rerr != nil || complains(out) || complains(text) {
		t.Errorf("%s, %s: %v %v\n%s%s", name, signature, err, rerr, out, text)
		return
	}
	again := filepath.Join(dir, "again")
	out, err = exec.Command(iasl, "-p", again, dsl).CombinedOutput()
	if err != nil || signature == "DSDT" && !bytes.Contains(out, []byte("0 Errors, 0 Warnings, 0 Remarks")) || complains(out) {
		t.Errorf("%s, compile %s: %v\n%s", name, signature, err, out)
	}
	if got, err := os.ReadFile(again + ".aml"); err != nil || !sameTable(got, table) {
		t.Errorf("%s: %s compiles to %d other bytes than its own %d (%v)", name, signature, len(got), len(table), err)
	}
}

// complains reports whether iasl found a fault, in what it printed or in the comments it wrote into a disassembly.
func complains(out []byte) bool {
	out = bytes.ReplaceAll(bytes.ToLower(out), []byte("0 errors, 0 warnings, 0 remarks"), nil)
	for _, word := range []string{"error", "warning", "remark", "incorrect", "invalid", "unknown", "**** "} {
		if bytes.Contains(out, []byte(word)) {
			return true
		}
	}
	return false
}

// sameTable compares two tables but for the checksum and the compiler's name and version, which iasl puts in for itself.
func sameTable(a, b []byte) bool {
	return len(a) == len(b) && bytes.Equal(a[:9], b[:9]) && bytes.Equal(a[10:28], b[10:28]) && bytes.Equal(a[36:], b[36:])
}
