package sandbox

import (
	"slices"
)

// Where the memory of a sandbox is. Frozen and disk both count as paused.
const (
	TierLive   = "live"
	TierFrozen = "frozen"
	TierDisk   = "disk"
)

// tier says where the memory is. Owner only.
func (s *Sandbox) tier() string {
	switch s.state() {
	case Paused, Stopped, Failed:
		if s.frozen != nil {
			return TierFrozen
		}
		return TierDisk
	default:
		return TierLive
	}
}

// watchMemory ends a frozen VM whenever the host runs short of memory. It ends with the manager.
func (m *Manager) watchMemory() {
	m.cfg.Memory.Watch(m.ctx, func() { m.demoteOldest("the host runs short of memory", "") })
}

// makeRoom ends frozen VMs until a VM with so much memory fits, or there are none left: they are the last that anybody needs. For
// is whose VM it is.
func (m *Manager) makeRoom(forID string, bytes uint64) {
	for m.ctx.Err() == nil {
		free, err := m.cfg.Memory.Available()
		if err != nil || free >= m.cfg.MemoryFloor+bytes || !m.demoteOldest("its memory is needed for another sandbox", forID) {
			return
		}
	}
}

// demoteOldest ends the VM that has been frozen longest and returns when it is gone; false if there is none.
func (m *Manager) demoteOldest(reason, butNot string) bool {
	views := slices.DeleteFunc(m.List(), func(v View) bool { return v.Tier != TierFrozen || v.ID == butNot })
	slices.SortFunc(views, func(a, b View) int { return a.Since.Compare(b.Since) })
	for _, v := range views {
		if s := m.find(v.ID); s != nil && s.Demote(reason) {
			return true
		}
	}
	return false
}

// endFrozen ends the frozen VM of a sandbox whose agent ends: nobody could wake it any more.
func (s *Sandbox) endFrozen() {
	var f *frozen
	s.do(func() {
		if f = s.frozen; f != nil {
			f.stop()
			s.frozen = nil
		}
	})
	if f == nil {
		return
	}
	if err := s.tearDown(f.l.vm); err != nil {
		s.log.Warn().Err(err).Msg("ending a frozen VM; the next agent will")
		return
	}
	s.do(func() {
		s.vm, s.resident = nil, 0
		s.tierEvent("the agent ends")
	})
	if err := s.removeTop(f.top); err != nil {
		s.log.Warn().Err(err).Msg("clearing up after a frozen VM")
	}
}
