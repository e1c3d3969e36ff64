import config.kernel.ids
import django.db.models.deletion
import django.db.models.expressions
import django.db.models.functions.datetime
from django.conf import settings
from django.db import migrations, models


class Migration(migrations.Migration):

    initial = True

    dependencies = [
        ('auth', '0012_alter_user_first_name_max_length'),
        migrations.swappable_dependency(settings.AUTH_USER_MODEL),
    ]

    operations = [
        migrations.CreateModel(
            name='Account',
            fields=[
                ('user', models.OneToOneField(on_delete=django.db.models.deletion.PROTECT, primary_key=True, related_name='credit_account', serialize=False, to=settings.AUTH_USER_MODEL)),
                ('balance', models.BigIntegerField(default=0)),
                ('held', models.BigIntegerField(default=0)),
                ('debt', models.BigIntegerField(default=0)),
                ('low_due', models.IntegerField(default=0)),
                ('created_at', models.DateTimeField(db_default=django.db.models.functions.datetime.Now())),
                ('updated_at', models.DateTimeField(db_default=django.db.models.functions.datetime.Now())),
            ],
            options={
                'permissions': [('grant_credits', 'Can grant credits'), ('refund_credits', 'Can refund credits'), ('adjust_credits', 'Can adjust accounts')],
                'indexes': [models.Index(models.F('user'), condition=models.Q(('low_due', 0), _negated=True), name='account_low_due')],
                'constraints': [models.CheckConstraint(condition=models.Q(('held__gte', 0)), name='account_held_not_negative'), models.CheckConstraint(condition=models.Q(('balance__gte', django.db.models.expressions.CombinedExpression(models.F('held'), '-', models.F('debt')))), name='account_available_not_negative'), models.CheckConstraint(condition=models.Q(('balance__gte', -9000000000000000000), ('balance__lte', 9000000000000000000)), name='account_balance_in_range')],
            },
        ),
        migrations.CreateModel(
            name='ChatDayTotal',
            fields=[
                ('amount', models.BigIntegerField()),
                ('records', models.BigIntegerField()),
                ('latest', models.DateTimeField()),
                ('pk', models.CompositePrimaryKey('account', 'day', 'chat_id', blank=True, editable=False, primary_key=True, serialize=False)),
                ('day', models.DateField()),
                ('chat_id', config.kernel.ids.RefField(max_length=32)),
                ('account', models.ForeignKey(db_constraint=False, db_index=False, on_delete=django.db.models.deletion.PROTECT, related_name='+', to='credits.account')),
            ],
            options={
                'abstract': False,
            },
        ),
        migrations.CreateModel(
            name='ChatTotal',
            fields=[
                ('amount', models.BigIntegerField()),
                ('records', models.BigIntegerField()),
                ('latest', models.DateTimeField()),
                ('pk', models.CompositePrimaryKey('account', 'chat_id', blank=True, editable=False, primary_key=True, serialize=False)),
                ('chat_id', config.kernel.ids.RefField(max_length=32)),
                ('account', models.ForeignKey(db_constraint=False, db_index=False, on_delete=django.db.models.deletion.PROTECT, related_name='+', to='credits.account')),
            ],
            options={
                'abstract': False,
            },
        ),
        migrations.CreateModel(
            name='LedgerEntry',
            fields=[
                ('id', config.kernel.ids.IdField(prefix='led', serialize=False)),
                ('type', models.CharField(choices=[('GRANT', 'Grant'), ('HOLD', 'Hold'), ('CAPTURE', 'Capture'), ('RELEASE', 'Release'), ('USAGE', 'Usage'), ('REFUND', 'Refund'), ('ADJUSTMENT', 'Adjustment'), ('EXPIRY', 'Expiry')], max_length=12)),
                ('amount', models.BigIntegerField()),
                ('tool_key', models.CharField(max_length=100, null=True)),
                ('chat_id', config.kernel.ids.RefField(max_length=32, null=True)),
                ('run_id', config.kernel.ids.RefField(max_length=32, null=True)),
                ('invocation_id', config.kernel.ids.RefField(max_length=32, null=True)),
                ('cause', models.CharField(max_length=200)),
                ('price', models.JSONField(null=True)),
                ('reason', models.CharField(default='', max_length=500)),
                ('reference', models.CharField(max_length=200, null=True)),
                ('expires_at', models.DateTimeField(null=True)),
                ('created_at', models.DateTimeField(db_default=django.db.models.functions.datetime.Now())),
                ('account', models.ForeignKey(db_index=False, on_delete=django.db.models.deletion.PROTECT, related_name='entries', to='credits.account')),
                ('against', models.ForeignKey(db_index=False, null=True, on_delete=django.db.models.deletion.PROTECT, related_name='answers', to='credits.ledgerentry')),
                ('staff', models.ForeignKey(db_index=False, null=True, on_delete=django.db.models.deletion.PROTECT, related_name='+', to=settings.AUTH_USER_MODEL)),
            ],
            options={
                'verbose_name_plural': 'ledger entries',
                'ordering': ['-created_at', '-id'],
                'indexes': [models.Index(models.F('account'), models.F('created_at'), models.F('id'), name='ledger_by_account'), models.Index(models.F('account'), models.F('created_at'), models.F('type'), models.F('tool_key'), models.F('chat_id'), models.F('amount'), condition=models.Q(('type__in', ['CAPTURE', 'USAGE', 'REFUND'])), name='ledger_spending'), models.Index(models.F('run_id'), models.F('type'), models.F('amount'), condition=models.Q(('run_id__isnull', False)), name='ledger_by_run'), models.Index(models.F('type'), models.F('id'), condition=models.Q(('type__in', ['GRANT', 'REFUND', 'ADJUSTMENT', 'EXPIRY'])), name='ledger_by_staff_type'), models.Index(models.F('against'), models.F('amount'), condition=models.Q(('type__in', ['REFUND', 'EXPIRY'])), name='ledger_corrections'), models.Index(models.F('account'), models.F('created_at'), condition=models.Q(('type__in', ['GRANT', 'REFUND', 'ADJUSTMENT', 'EXPIRY'])), name='ledger_changes')],
                'constraints': [models.CheckConstraint(condition=models.Q(('type__in', ['GRANT', 'HOLD', 'CAPTURE', 'RELEASE', 'USAGE', 'REFUND', 'ADJUSTMENT', 'EXPIRY'])), name='ledger_type_known'), models.CheckConstraint(condition=models.Q(('amount__gt', 0), models.Q(('amount', 0), ('type', 'USAGE')), models.Q(('amount__lt', 0), ('type', 'ADJUSTMENT')), models.Q(('against__isnull', False), ('amount', 0), ('type', 'ADJUSTMENT')), _connector='OR'), name='ledger_amount_sign'), models.CheckConstraint(condition=models.Q(models.Q(('against__isnull', False), ('type__in', ['CAPTURE', 'RELEASE', 'USAGE', 'REFUND', 'EXPIRY'])), models.Q(models.Q(('type__in', ['CAPTURE', 'RELEASE', 'USAGE', 'REFUND', 'EXPIRY']), _negated=True), ('against__isnull', True)), models.Q(('amount__lte', 0), ('type', 'ADJUSTMENT')), _connector='OR'), name='ledger_against_by_type'), models.CheckConstraint(condition=models.Q(('type', 'GRANT'), ('expires_at__isnull', True), _connector='OR'), name='ledger_only_grants_expire'), models.CheckConstraint(condition=models.Q(models.Q(('type__in', ['REFUND', 'ADJUSTMENT']), _negated=True), models.Q(('reason', ''), _negated=True), _connector='OR'), name='ledger_correction_has_reason'), models.CheckConstraint(condition=models.Q(models.Q(('type__in', ['REFUND', 'ADJUSTMENT']), _negated=True), ('staff__isnull', False), models.Q(('against__isnull', False), ('type', 'ADJUSTMENT')), _connector='OR'), name='ledger_correction_has_staff'), models.UniqueConstraint(fields=('cause',), name='ledger_cause_once'), models.UniqueConstraint(condition=models.Q(('type__in', ['CAPTURE', 'RELEASE', 'USAGE'])), fields=('against', 'type'), name='ledger_one_settlement_of_a_kind')],
            },
        ),
        migrations.CreateModel(
            name='RunTotal',
            fields=[
                ('amount', models.BigIntegerField()),
                ('records', models.BigIntegerField()),
                ('latest', models.DateTimeField()),
                ('pk', models.CompositePrimaryKey('account', 'chat_id', 'run_id', 'tool_key', blank=True, editable=False, primary_key=True, serialize=False)),
                ('chat_id', config.kernel.ids.RefField(max_length=32)),
                ('run_id', config.kernel.ids.RefField(max_length=32)),
                ('tool_key', models.CharField(max_length=100)),
                ('account', models.ForeignKey(db_constraint=False, db_index=False, on_delete=django.db.models.deletion.PROTECT, related_name='+', to='credits.account')),
            ],
            options={
                'abstract': False,
            },
        ),
        migrations.CreateModel(
            name='DayTotal',
            fields=[
                ('amount', models.BigIntegerField()),
                ('records', models.BigIntegerField()),
                ('latest', models.DateTimeField()),
                ('pk', models.CompositePrimaryKey('account', 'day', 'tool_key', blank=True, editable=False, primary_key=True, serialize=False)),
                ('day', models.DateField()),
                ('tool_key', models.CharField(max_length=100)),
                ('account', models.ForeignKey(db_constraint=False, db_index=False, on_delete=django.db.models.deletion.PROTECT, related_name='+', to='credits.account')),
            ],
            options={
                'indexes': [models.Index(models.F('day'), name='day_total_by_day')],
            },
        ),
        migrations.CreateModel(
            name='PendingExpiry',
            fields=[
                ('grant', models.OneToOneField(on_delete=django.db.models.deletion.PROTECT, primary_key=True, related_name='+', serialize=False, to='credits.ledgerentry')),
                ('expires_at', models.DateTimeField()),
                ('account', models.ForeignKey(db_index=False, on_delete=django.db.models.deletion.PROTECT, related_name='+', to='credits.account')),
            ],
            options={
                'verbose_name_plural': 'pending expiries',
                'indexes': [models.Index(models.F('account'), models.F('expires_at'), name='expiry_by_account')],
            },
        ),
    ]
