package e2e

import (
	"errors"
	"fmt"
	"strings"
	"testing"

	"torpor/tools/rest"
)

// aside is where a damaged file's original waits.
const aside = "/var/lib/torpor/e2e-aside"

// damage is something that happens to a file, as a shell line for $f and one that undoes it.
type damage struct{ name, do, undo string }

// flip changes the byte at an offset, which may be a shell expression with $size and, for the end of data, $data.
func flip(name, offset string) damage {
	const poke = `printf "\\$(printf %%o $((%s)))" | dd of="$f" bs=1 seek=$at conv=notrunc 2>/dev/null`
	at := fmt.Sprintf(`size=$(stat -c %%s "$f"); at=$((%s)); `, offset)
	return damage{
		name,
		at + `was=$(dd if="$f" bs=1 skip=$at count=1 2>/dev/null | od -An -tu1 | tr -d ' '); echo $was > ` + aside + `; ` + fmt.Sprintf(poke, "was ^ 16"),
		at + `was=$(cat ` + aside + `); ` + fmt.Sprintf(poke, "was"),
	}
}

// A bit that flips on the disk, of which no time of modification tells, is found as well: at the wake, or soon after it, and then the
// sandbox does not go on with memory that is not its own.
func TestSilentDamageOfMemoryIsFound(t *testing.T) {
	sb := newSandbox(t, rest.NewSandbox{})
	keepMemory(t, sb, 8) // random, in one piece: long enough to be mapped and not read
	pause(t, sb.SandboxID)
	hostShell(t, killVMM(sb.SandboxID))
	file := hostShell(t, "find "+sandboxDir(sb.SandboxID)+"/gen-* -type f -exec stat -c '%s %n' {} + | sort -n | tail -n 1 | cut -d' ' -f2")
	hostShell(t, `f='`+file+`'; touch -r "$f" `+aside+`; `+strings.ReplaceAll(flip("middle", "size / 2").do, aside, aside+".byte")+`; touch -r `+aside+` "$f"; rm -f `+aside+"*")
	_, _, err := sys.Connect(within(t, callLimit), sb.SandboxID, lifetime)
	if err != nil {
		t.Logf("found at the wake: %v", err)
		var answer *rest.Error
		if !errors.As(err, &answer) || answer.Code != "sandbox_broken" {
			t.Errorf("%v, want sandbox_broken", err)
		}
		return
	}
	s := awaitDead(t, sb.SandboxID)
	t.Logf("found after the wake: %s", s.VM.Reason)
	if !strings.Contains(s.VM.Reason, "memory") {
		t.Errorf("reason %q", s.VM.Reason)
	}
}
