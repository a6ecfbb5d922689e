package machine

// undo is what takes back a half-built machine, newest step first.
type undo []func()

func (u *undo) add(f func()) { *u = append(*u, f) }

// run takes everything back.
func (u *undo) run() {
	for i := len(*u) - 1; i >= 0; i-- {
		(*u)[i]()
	}
	*u = nil
}
