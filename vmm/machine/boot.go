package machine

import (
	"crypto/rand"
	"errors"
	"fmt"
	"os"

	"github.com/rs/zerolog"

	"torpor/vmm/guestmem"
	"torpor/vmm/loader"
	"torpor/vmm/x86"
)

// Boot makes a machine and starts a kernel in it. The guest runs when Boot returns. The files are the machine's, see Config.
func Boot(cfg Config, k Kernel, log zerolog.Logger) (_ *Machine, err error) {
	defer func() {
		closeFiles(k.Image, k.Initrd)
		if err != nil {
			cfg.close()
		}
	}()
	err = cfg.validate()
	if k.Image == nil {
		err = errors.Join(err, fmt.Errorf("%w: no kernel", ErrConfig))
	}
	if err != nil {
		return nil, err
	}
	mem, err := newAnonymousRAM(cfg.MemoryBytes)
	if err != nil {
		return nil, err
	}
	m, err := assemble(cfg, mem, log)
	if err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			_ = m.Close()
		}
	}()
	if err := m.checkTemplate(); err != nil {
		return nil, err
	}
	entry, err := m.load(k)
	if err != nil {
		return nil, err
	}
	for _, c := range m.vcpus {
		if err := c.do(func() error { return m.resetVCPU(c, entry) }); err != nil {
			return nil, fmt.Errorf("set up vCPU %d: %w", c.id, err)
		}
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	m.runLocked()
	return m, nil
}

// load fills guest memory with all that the kernel finds at its first instruction, and returns where that is.
func (m *Machine) load(k Kernel) (entry uint64, err error) {
	kernel, err := loader.ELF(k.Image, m.ram.mem, x86.HighRAMAddr)
	if err != nil {
		return 0, err
	}
	initrd, err := m.loadInitrd(k.Initrd, kernel.End)
	if err != nil {
		return 0, err
	}
	if err := loader.Cmdline(k.Cmdline, m.ram.mem, x86.CmdlineAddr, x86.MaxCmdline); err != nil {
		return 0, fmt.Errorf("%w: %w", ErrConfig, err)
	}
	seed := make([]byte, x86.RNGSeedBytes)
	_, _ = rand.Read(seed) // never fails (crypto/rand)
	zeroPage := x86.ZeroPage(x86.BootParams{
		Memory: m.shape.MemoryBytes, Initrd: initrd, RSDP: x86.ACPIAddr, SetupData: x86.SetupDataAddr,
	})
	for _, part := range []struct {
		addr guestmem.Addr
		b    []byte
	}{
		{x86.GDTAddr, x86.GDT()},
		{x86.SetupDataAddr, x86.RNGSeed(seed)},
		{x86.ZeroPageAddr, zeroPage},
		{x86.PML4Addr, x86.PageTables()},
		{x86.ACPIAddr, m.tables()},
	} {
		if err := m.ram.mem.WriteAt(part.b, part.addr); err != nil {
			return 0, fmt.Errorf("write boot data: %w", err)
		}
	}
	return kernel.Entry, nil
}

func (m *Machine) loadInitrd(f *os.File, floor uint64) (x86.Range, error) {
	if f == nil {
		return x86.Range{}, nil
	}
	info, err := f.Stat()
	if err != nil {
		return x86.Range{}, fmt.Errorf("open initrd: %w", err)
	}
	limit := min(x86.RAM(m.shape.MemoryBytes)[0].Size, x86.InitrdMax)
	addr, err := loader.Initrd(f, info.Size(), m.ram.mem, floor, limit)
	return x86.Range{Addr: addr, Size: uint64(info.Size())}, err
}

// resetVCPU brings a vCPU to where the kernel expects it: the first at its entry point, the others waiting for a start-up IPI.
// Preconditions: on the vCPU's thread.
func (m *Machine) resetVCPU(c *vcpu, entry uint64) error {
	cpuid, err := m.cpuid(c.id)
	if err != nil {
		return err
	}
	if err := c.kvm.SetCPUID(cpuid); err != nil {
		return err
	}
	lapic, err := c.kvm.LAPIC()
	if err != nil {
		return err
	}
	x86.SetLINT(&lapic)
	if err := c.kvm.SetLAPIC(&lapic); err != nil {
		return err
	}
	if err := m.setMSRs(c, x86.BootMSRs()); err != nil {
		return err
	}
	if c.id != 0 {
		return nil
	}
	sregs, err := c.kvm.Sregs()
	if err != nil {
		return err
	}
	sregs, regs := x86.BootSregs(sregs), x86.BootRegs(entry)
	if err := c.kvm.SetSregs(&sregs); err != nil {
		return err
	}
	return c.kvm.SetRegs(&regs)
}
