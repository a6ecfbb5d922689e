package main

import (
	"strings"
	"testing"
)

const smaps = `00400000-00600000 r-xp 00000000 fd:00 12 /torpor-vmm
Size:               2048 kB
Pss:                 700 kB
Pss_Dirty:           100 kB
c000000000-c000400000 rw-p 00000000 00:00 0 
Pss:                 300 kB
7f0000000000-7f0001000000 rw-p 00000000 fd:00 77 /var/lib/torpor/agent/templates/x/mem
Pss:                4000 kB
7f0001000000-7f0001001000 rw-p 00000000 00:00 0 
Pss:                  16 kB
7f0001001000-7f0001100000 rw-p 00000000 fd:00 79 /var/lib/torpor/agent/sandboxes/i1/gen-2/mem.diff (deleted)
Pss:                  80 kB
7f0001100000-7f0001101000 rw-p 00000000 00:00 0 
Pss:                   4 kB
VmFlags: rd wr
`

func TestParseSmaps(t *testing.T) {
	own, guest, err := parseSmaps(strings.NewReader(smaps))
	if err != nil || own != 1004<<10 || guest != 4096<<10 {
		t.Errorf("own %d KiB, guest %d KiB, %v; want 1004 and 4096", own>>10, guest>>10, err)
	}
	for _, bad := range []string{"xx-yy r-xp 0 0 0\n", "00-10 r-xp 0 0 0\nPss: many kB\n"} {
		if _, _, err := parseSmaps(strings.NewReader(bad)); err == nil {
			t.Errorf("%q was read", bad)
		}
	}
}
