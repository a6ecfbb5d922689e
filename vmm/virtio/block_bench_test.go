package virtio

import (
	"fmt"
	"path/filepath"
	"testing"

	"torpor/vmm/cow"
)

// BenchmarkBlock measures the way from the queue to the file and back, with 16 requests in the queue at a time, as a guest with
// read-ahead has: pieces of 4 KiB, as guests scatter their page cache.
func BenchmarkBlock(b *testing.B) {
	for _, c := range []struct {
		name  string
		typ   uint32
		bytes int
		state string // of what is read or written
	}{
		{"read 4K of a layer", 0, 4 << 10, "layer"},
		{"read 128K of a layer", 0, 128 << 10, "layer"},
		{"read 128K of the base", 0, 128 << 10, "base"},
		{"read 128K of zeros", 0, 128 << 10, "zero"},
		{"write 4K in place", 1, 4 << 10, "layer"},
		{"write 128K in place", 1, 128 << 10, "layer"},
		{"write 512 in place", 1, 512, "layer"},
	} {
		b.Run(c.name, func(b *testing.B) { benchmarkBlock(b, c.typ, c.bytes, c.state) })
	}
}

func benchmarkBlock(b *testing.B, typ uint32, size int, state string) {
	const inQueue = 7 // of 256 descriptors, at 34 for a request of 128 KiB
	top := filepath.Join(b.TempDir(), "top")
	if err := cow.Create(top, testDisk); err != nil {
		b.Fatal(err)
	}
	chain, err := cow.OpenChain(testBase(b), nil, top)
	if err != nil {
		b.Fatal(err)
	}
	defer chain.Close()
	switch state {
	case "layer":
		if _, err := chain.WriteAt(pattern(testDisk, 1), 0); err != nil {
			b.Fatal(err)
		}
	case "zero":
		if err := chain.Discard(0, testDisk); err != nil {
			b.Fatal(err)
		}
	}
	d := start(b, NewBlock(chain, "", false, nil))
	var heads []uint16
	for i := range inQueue {
		bufs := []buffer{d.in(blockHeader(typ, uint64(i*size/512)))}
		for left := size; left > 0; left -= min(left, 4096) {
			d.alloc(64) // the next page of the page cache is elsewhere
			bufs = append(bufs, buffer{d.alloc(uint64(min(left, 4096))), uint32(min(left, 4096)), typ == 0})
		}
		bufs = append(bufs, d.out(1))
		heads = append(heads, d.add(0, bufs...))
	}
	d.notify(0)
	for range inQueue {
		d.wait(0)
	}
	b.SetBytes(int64(size))
	b.ReportAllocs()
	q := d.queues[0]
	for done, made := 0, 0; done < b.N; {
		for made < b.N && made-done < inQueue {
			q.chains[heads[made%inQueue]] = nil
			d.publish(0, heads[made%inQueue])
			made++
		}
		d.notify(0)
		for target := min(made, b.N); done < target; done++ {
			d.wait(0)
		}
	}
	b.StopTimer()
	if len(q.chains) != 0 {
		b.Fatal(fmt.Errorf("%d requests did not come back", len(q.chains)))
	}
}
