package sandbox

import (
	"context"
	"sync"
)

// hub tells watchers which sandboxes changed. A slow watcher gets the last state of each sandbox, not every one in between.
type hub struct {
	mu       sync.Mutex
	watchers map[*watcher]struct{} // guarded by mu
}

type watcher struct {
	mu    sync.Mutex
	dirty map[string]struct{} // guarded by mu
	kick  chan struct{}       // capacity 1
}

func (h *hub) changed(id string) {
	h.mu.Lock()
	defer h.mu.Unlock()
	for w := range h.watchers {
		w.mark(id)
	}
}

func (w *watcher) mark(id string) {
	w.mu.Lock()
	w.dirty[id] = struct{}{}
	w.mu.Unlock()
	select {
	case w.kick <- struct{}{}:
	default:
	}
}

func (w *watcher) take() map[string]struct{} {
	w.mu.Lock()
	defer w.mu.Unlock()
	taken := w.dirty
	w.dirty = map[string]struct{}{}
	return taken
}

// Change is one sandbox's news.
type Change struct {
	View    View
	Removed bool // View then holds the id only
}

// Watch calls tell with the present state of every sandbox, or of the one named, and then with each change, until ctx ends or
// tell returns an error.
func (m *Manager) Watch(ctx context.Context, id string, tell func(Change) error) error {
	w := &watcher{dirty: map[string]struct{}{}, kick: make(chan struct{}, 1)}
	m.hub.mu.Lock()
	m.hub.watchers[w] = struct{}{}
	m.hub.mu.Unlock()
	defer func() {
		m.hub.mu.Lock()
		delete(m.hub.watchers, w)
		m.hub.mu.Unlock()
	}()
	for _, v := range m.List() {
		w.mark(v.ID)
	}
	if id != "" {
		w.mark(id) // an unknown one is told as removed
	}
	for {
		for changed := range w.take() {
			if id != "" && changed != id {
				continue
			}
			if err := tell(m.change(changed)); err != nil {
				return err
			}
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-m.ctx.Done():
			return errDraining
		case <-w.kick:
		}
	}
}

func (m *Manager) change(id string) Change {
	if s := m.find(id); s != nil {
		return Change{View: s.View()}
	}
	gone := Change{Removed: true}
	gone.View.ID = id
	return gone
}
