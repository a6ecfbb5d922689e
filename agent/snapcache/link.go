package snapcache

import (
	"fmt"
)

// Link puts a file of a published snapshot into the draft as well, under the name as: a hard link, so that both have it and it is on
// the disk once, for as long as either lives. What is known of it is taken over: nothing is read.
func (d *Draft) Link(from *Snapshot, name, as string) error {
	known, ok := from.file(name)
	if !ok {
		return &PartError{from.Dir, name, "the manifest does not name it"}
	}
	if err := d.fs.Link(from.Path(name), d.Path(as)); err != nil {
		return fmt.Errorf("share %s of snapshot %s: %w", name, from.Dir, err)
	}
	known.Name = as
	d.links[as] = known
	return nil
}

// LinkLayer puts a disk layer that nobody writes any more into the draft, as a hard link, under the name as. It is no file of the
// snapshot but one of its Layers: it has checks of its own (vmm/cow) and is not read.
func (d *Draft) LinkLayer(path, as string) error {
	if err := d.fs.Link(path, d.Path(as)); err != nil {
		return fmt.Errorf("share a disk layer: %w", err)
	}
	d.layers[as] = true
	return nil
}
