package main

import (
	"errors"
	"os"

	"torpor/api/fdpass"
	"torpor/api/vmmpb"
	"torpor/vmm/machine"
)

// claims are the files of one call. Either all are there or none is taken.
type claims struct {
	from  *fdpass.Inbox
	files []*os.File
	errs  []error
}

// file takes the file of a name; an error is for check to tell.
func (c *claims) file(name string) *os.File {
	f, err := c.from.Claim(name)
	if err != nil {
		c.errs = append(c.errs, err)
		return nil
	}
	c.files = append(c.files, f)
	return f
}

// optional is file for a name that may be empty, which is no file.
func (c *claims) optional(name string) *os.File {
	if name == "" {
		return nil
	}
	return c.file(name)
}

// all takes the files of several names.
func (c *claims) all(names []string) []*os.File {
	var files []*os.File
	for _, name := range names {
		files = append(files, c.file(name))
	}
	return files
}

// check closes what was taken if something is missing.
func (c *claims) check() error {
	if len(c.errs) == 0 {
		return nil
	}
	c.giveBack()
	return errors.Join(c.errs...)
}

// giveBack closes what was taken.
func (c *claims) giveBack() {
	for _, f := range c.files {
		_ = f.Close() // nothing was written to it
	}
}

// config translates the machine of a request; package machine judges it.
func (c *claims) config(m *vmmpb.Machine) machine.Config {
	cfg := machine.Config{VCPUs: int(m.GetVcpus()), MemoryBytes: m.GetMemoryBytes(), CPUTemplate: m.GetCpuTemplate()}
	for _, d := range m.GetDisks() {
		disk := machine.Disk{ID: d.GetId(), Base: c.optional(d.GetBase()), Top: c.optional(d.GetTop()), Limit: limit(d.GetLimit())}
		for _, l := range d.GetLayers() {
			disk.Layers = append(disk.Layers, c.file(l))
		}
		cfg.Disks = append(cfg.Disks, disk)
	}
	if v := m.GetVsock(); v != nil {
		cfg.Vsock = &machine.Vsock{CID: v.GetCid()}
	}
	for _, n := range m.GetNets() {
		card := machine.Net{
			ID: n.GetId(), Tap: c.optional(n.GetTap()),
			LimitRX: limit(n.GetLimitRx()), LimitTX: limit(n.GetLimitTx()),
		}
		if len(n.GetMac()) == len(card.MAC) {
			copy(card.MAC[:], n.GetMac())
		}
		cfg.Net = append(cfg.Net, card)
	}
	if con := m.GetConsole(); con.GetEnabled() {
		cfg.Console = &machine.Console{Log: c.optional(con.GetLog()), MaxBytes: con.GetMaxBytes()}
	}
	if b := m.GetBalloon(); b != nil {
		cfg.Balloon = &machine.Balloon{Reporting: b.GetReporting()}
	}
	return cfg
}
